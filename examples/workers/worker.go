package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/seed-4c80c132/coord"
	_ "modernc.org/sqlite"
)

const (
	ttl   = 1500 * time.Millisecond // of leases and membership: how soon a crash is noticed
	piece = 10 * time.Millisecond   // of work
)

// workerEnv makes a process of this program a worker. It holds a workerConfig. (In
// the environment, since everyone may read command lines, and the URL of a
// database may hold a password.)
const workerEnv = "COORD_EXAMPLE_WORKER"

type workerConfig struct {
	Name       string // its node name, unique in the run
	Run        string // names the group and the service of this run
	Partitions int
	Driver     string
	DSN        string
	Record     string // the file that it appends its record to
}

func workerMain(text string) int {
	signal.Ignore(os.Interrupt, syscall.SIGHUP, syscall.SIGPIPE) // the parent decides, see run, and may be gone
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // The parent closes the pipe, or dies, which closes it too.
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	var config workerConfig
	err := json.Unmarshal([]byte(text), &config)
	if err == nil {
		err = runWorker(ctx, config)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	return exitOK
}

// runWorker works on its share of the partitions until ctx ends. It has given all of
// them up when it returns.
func runWorker(ctx context.Context, config workerConfig) error {
	db, c, err := open(config.Driver, config.DSN)
	if err != nil {
		return err
	}
	defer db.Close()
	defer c.Close()
	rec, err := createRecord(config.Record)
	if err != nil {
		return err
	}
	defer rec.Close()
	return c.RunPartitions(ctx, coord.PartitionConfig{
		Service:    config.Run,
		Node:       config.Name,
		Group:      config.Run,
		Partitions: config.Partitions,
		TTL:        ttl,
	}, func(ctx context.Context, lease coord.Lease) error {
		work(ctx, rec, lease)
		return nil
	})
}

// work works on a partition until ctx ends: when the lease is lost, when the partition
// moves to another worker, or when this worker leaves. Nobody else works on it before
// work has returned, unless this process is suspended for so long that it could not
// keep the lease.
func work(ctx context.Context, rec *record, lease coord.Lease) {
	rec.write("start", lease, sharedNow())
	for ctx.Err() == nil {
		rec.write("extend", lease, sharedNow()+piece) // before the work: a kill may come in its midst
		pause(ctx, piece)                             // stands for real work
	}
	rec.write("stop", lease, sharedNow())
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// open opens the database and a Coord on it.
func open(driver, dsn string) (*sql.DB, *coord.Coord, error) {
	dialect := coord.SQLite
	if driver == "pgx" {
		dialect = coord.Postgres
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, nil, fmt.Errorf("open the %s database: %w", dialect.Name(), err)
	}
	// An answer that takes longer than this is of no use: the lease would be lost.
	c, err := coord.New(db, dialect, coord.Config{Prefix: "workers_", Timeout: ttl / 2, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return db, c, nil
}
