package integration

import (
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// BenchmarkHeld is what a thousand locks cost while one Coord holds them, at default settings:
// mutexes, and ids in sets. WAL-B/renewal is the WAL for one lock and renewal, and HOT-% the share
// of renewals that touch no index. The processor time is for one lock and minute, in which it is
// renewed six to seven times: client-us is this process's, and server-us that of the sessions. A
// window of 30 s has three or four renewals, so run it for several.
func BenchmarkHeld(b *testing.B) {
	const locks = 1000
	for _, e := range engines {
		if !e.postgres() || e.pooler {
			continue
		}
		server := testdb.NewCluster(b) // The WAL is everybody's.
		e.dsn = func(testing.TB) string { return server.URL() }
		for _, held := range []struct {
			name                string
			mutexes, sets, size int
		}{{"mutexes", locks, 0, 0}, {"sets-of-5", 0, locks / 5, 5}, {"sets-of-100", 0, locks / 100, 100}} {
			b.Run(fmt.Sprint(e.name, "/", held.name), func(b *testing.B) {
				e := newEnv(b, e, nil)
				e.exec(b, `DROP TABLE IF EXISTS coord_mutex, coord_eidlock, coord_format;
					DROP SEQUENCE IF EXISTS coord_mutex_fence, coord_eidlock_fence; CHECKPOINT`)
				db := e.open(b)
				db.SetMaxOpenConns(10)
				all := gather(b, newCoord(b, db, e.dialect, coord.Config{}), held.mutexes, held.sets, held.size)
				benchmarkHeld(b, e, locks)
				if mutexes, sets := all.lost(); mutexes+sets > 0 {
					b.Errorf("%d mutexes and %d sets were lost", mutexes, sets)
				}
			})
		}
	}
}

// spent is what has been spent so far.
type spent struct {
	wal, updates, hot int64
	client, server    time.Duration
}

func (e *env) spent(b *testing.B) (s spent) {
	b.Helper()
	e.scan(b, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &s.wal)
	e.scan(b, "SELECT sum(n_tup_upd) FROM pg_stat_user_tables", &s.updates)
	e.scan(b, "SELECT sum(n_tup_hot_upd) FROM pg_stat_user_tables", &s.hot)
	var nanoseconds sql.NullInt64 // Linux only.
	e.scan(b, `SELECT sum(split_part(pg_read_file('/proc/' || pid || '/schedstat', 0, 100, true), ' ', 1)::bigint)
		FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`, &nanoseconds)
	s.client, s.server = processTime(), time.Duration(nanoseconds.Int64)
	return s
}

func benchmarkHeld(b *testing.B, e *env, locks float64) {
	time.Sleep(25 * time.Second) // The first renewals log whole pages.
	var sum spent
	var took time.Duration
	for b.Loop() {
		before, began := e.spent(b), time.Now()
		time.Sleep(30 * time.Second)
		after := e.spent(b)
		took += time.Since(began)
		sum.wal, sum.updates, sum.hot = sum.wal+after.wal-before.wal, sum.updates+after.updates-before.updates, sum.hot+after.hot-before.hot
		sum.client, sum.server = sum.client+after.client-before.client, sum.server+after.server-before.server
	}
	if sum.updates == 0 {
		b.Fatal("nothing was renewed")
	}
	perLock := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / locks / took.Minutes() }
	b.ReportMetric(float64(sum.wal)/float64(sum.updates), "WAL-B/renewal")
	b.ReportMetric(float64(sum.hot)/float64(sum.updates)*100, "HOT-%")
	b.ReportMetric(float64(sum.updates)/locks/took.Minutes(), "renewals/min")
	b.ReportMetric(perLock(sum.client), "client-us/min")
	b.ReportMetric(perLock(sum.server), "server-us/min")
}
