package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// counting is a driver's connector that counts the statements that go through it.
type counting struct {
	driver.Connector
	statements *atomic.Int64
}

func (c counting) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &countedConn{conn.(*stdlib.Conn), c.statements}, nil
}

// countedConn counts, in a pool whose statements are sent unprepared.
type countedConn struct {
	*stdlib.Conn
	statements *atomic.Int64
}

func (c *countedConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.statements.Add(1)
	return c.Conn.QueryContext(ctx, text, args)
}

func (c *countedConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.statements.Add(1)
	return c.Conn.ExecContext(ctx, text, args)
}

// BenchmarkRun is what a group costs the database while nothing happens, at the
// default TTL of 15 s: statements and bytes of WAL a second. Both grow with the
// heartbeats, so with nodes; the WAL also with the rows that one renewal writes.
func BenchmarkRun(b *testing.B) {
	for _, e := range engines {
		if e.name != "postgres-pgx" {
			continue
		}
		server := testdb.NewCluster(b) // The WAL is everybody's.
		e.dsn = func(testing.TB) string { return server.URL() }
		for _, size := range []struct{ nodes, partitions int }{{100, 1000}, {100, 100}, {10, 1000}, {10, 100}} {
			b.Run(fmt.Sprintf("nodes=%d/partitions=%d", size.nodes, size.partitions), func(b *testing.B) {
				benchmarkRun(b, newEnv(b, e, nil), size.nodes, size.partitions)
			})
		}
	}
}

func benchmarkRun(b *testing.B, e *env, nodes, partitions int) {
	var statements, running atomic.Int64
	e.exec(b, "DROP TABLE IF EXISTS coord_lease, coord_member, coord_mutex, coord_format; DROP SEQUENCE IF EXISTS coord_mutex_fence; CHECKPOINT")
	begin(b, e, nodes, partitions, &statements, &running)
	eventually(b, "every partition runs", func() bool { return running.Load() == int64(partitions) })
	time.Sleep(6 * time.Second) // The first renewals log whole pages.
	position := func() (wal int64) {
		e.scan(b, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &wal)
		return wal
	}
	var sent, wal float64
	var took time.Duration
	for b.Loop() { // Two heartbeats each.
		began, before, from := time.Now(), statements.Load(), position()
		time.Sleep(10 * time.Second)
		took += time.Since(began)
		sent, wal = sent+float64(statements.Load()-before), wal+float64(position()-from)
	}
	if running.Load() != int64(partitions) {
		b.Errorf("%d partitions run in the end, want %d", running.Load(), partitions)
	}
	b.ReportMetric(sent/took.Seconds(), "statements/s")
	b.ReportMetric(wal/took.Seconds(), "WAL-B/s")
}

// begin starts nodes on pools of their own, which end with the benchmark.
func begin(b *testing.B, e *env, nodes, partitions int, statements, running *atomic.Int64) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	if err := e.coord(b).Migrate(ctx); err != nil {
		b.Fatal(err)
	}
	base, err := stdlib.GetDefaultDriver().(driver.DriverContext).OpenConnector(e.url)
	if err != nil {
		b.Fatal(err)
	}
	for i := range nodes {
		db := sql.OpenDB(counting{base, statements})
		b.Cleanup(func() { db.Close() })
		cfg := e.config()
		cfg.NoPrepare, cfg.Timeout = true, 0 // pgx prepares by itself.
		c := newCoord(b, db, e.dialect, cfg)
		all.Go(func() {
			cfg := coord.PartitionConfig{Service: "bench", Node: fmt.Sprint("node-", i), Group: "bench", Partitions: partitions}
			err := c.RunPartitions(ctx, cfg, func(ctx context.Context, _ coord.Lease) error {
				running.Add(1)
				defer running.Add(-1)
				<-ctx.Done()
				return nil
			})
			if err != nil {
				b.Error(err)
			}
		})
	}
	b.Cleanup(func() { cancel(); all.Wait() })
}
