package integration

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// TestMain also serves as the main of the processes that tests start.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	os.Exit(testdb.Main(m))
}

// engine is one way to reach a database: an engine and a driver.
type engine struct {
	name    string
	driver  string
	dialect coord.Dialect
	dsn     func(testing.TB) string // of a database of the test's own
	pooler  bool                    // there is a PgBouncer in transaction mode before it
}

var engines = []engine{
	{"sqlite-memory", "sqlite", coord.SQLite, memoryDSN, false},
	{"sqlite-file", "sqlite", coord.SQLite, fileDSN, false},
	{"postgres-pq", "postgres", coord.Postgres, testdb.Postgres, false},
	{"postgres-pgx", "pgx", coord.Postgres, testdb.Postgres, false},
	{"pgbouncer-pq", "postgres", coord.Postgres, through("binary_parameters=yes"), true},
	{"pgbouncer-pgx", "pgx", coord.Postgres, through("default_query_exec_mode=exec"), true},
}

// through is PgBouncer's URL with what a driver needs there.
func through(parameter string) func(testing.TB) string {
	return func(t testing.TB) string { t.Helper(); return testdb.PgBouncer(t, "") + "&" + parameter }
}

func (e engine) postgres() bool { return e.dialect == coord.Postgres }

var memories atomic.Int64

// memoryDSN names a database in memory that all connections of the process share.
func memoryDSN(testing.TB) string {
	return fmt.Sprintf("file:/coord-%d?vfs=memdb&_pragma=busy_timeout(10000)", memories.Add(1))
}

func fileDSN(t testing.TB) string {
	return "file:" + filepath.Join(t.TempDir(), "coord.db") + "?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=synchronous(OFF)"
}

// env is one database that a test has to itself, and the clock that judges expiry
// there.
type env struct {
	engine
	url   string
	clock *clock // nil: the database's
	db    *sql.DB
}

// each runs test on every engine, with the database's clock and with a given one.
func each(t *testing.T, test func(*testing.T, *env)) {
	for _, e := range chosen() {
		t.Run(e.name+"/database-clock", func(t *testing.T) { test(t, newEnv(t, e, nil)) })
		t.Run(e.name+"/given-clock", func(t *testing.T) { test(t, newEnv(t, e, newClock())) })
	}
}

// eachEngine runs test on every engine with the database's clock.
func eachEngine(t *testing.T, test func(*testing.T, *env)) {
	for _, e := range chosen() {
		t.Run(e.name, func(t *testing.T) { test(t, newEnv(t, e, nil)) })
	}
}

// chosen are the engines whose names begin with COORD_TEST_ENGINES: all, if it is not
// set. It is for a second run on another version of a server.
func chosen() []engine {
	return slices.DeleteFunc(slices.Clone(engines), func(e engine) bool { return !strings.HasPrefix(e.name, os.Getenv("COORD_TEST_ENGINES")) })
}

// eachPostgres is eachEngine without SQLite and poolers.
func eachPostgres(t *testing.T, test func(*testing.T, *env)) {
	for _, e := range engines {
		if e.postgres() && !e.pooler {
			t.Run(e.name, func(t *testing.T) { test(t, newEnv(t, e, nil)) })
		}
	}
}

// newEnv also makes sure that the test leaves no goroutine behind.
func newEnv(t testing.TB, e engine, clock *clock) *env {
	t.Helper()
	env := &env{engine: e, clock: clock, url: e.dsn(t)}
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		// pgx drains a connection that was cancelled in the background, for as long as a pooler takes to close it.
		for deadline := time.Now().Add(20 * time.Second); goleak.Find(before) != nil && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
		}
		goleak.VerifyNone(t, before)
	})
	env.db = env.open(t)
	return env
}

// open returns another pool on the same database. No connection of it may be in
// use when the test is over.
func (e *env) open(t testing.TB) *sql.DB {
	t.Helper()
	db, err := sql.Open(e.driver, e.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A caller who left while it waited for one hands it back a moment later.
		eventually(t, "every borrowed connection is given back", func() bool { return db.Stats().InUse == 0 })
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func (e *env) config() coord.Config {
	cfg := coord.Config{Timeout: 30 * time.Second, NoPrepare: e.pooler} // The machine may be busy, and SQLite's writers queue.
	if e.clock != nil {
		cfg.Clock = e.clock.Now
	}
	return cfg
}

// coord returns a Coord on the environment's pool.
func (e *env) coord(t testing.TB) *coord.Coord {
	t.Helper()
	return newCoord(t, e.db, e.dialect, e.config())
}

func newCoord(t testing.TB, db *sql.DB, d coord.Dialect, cfg coord.Config) *coord.Coord {
	t.Helper()
	c, err := coord.New(db, d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// exec runs statements that are not coord's.
func (e *env) exec(t testing.TB, query string, args ...any) {
	t.Helper()
	if _, err := e.db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// scan reads one row with a statement that is not coord's.
func (e *env) scan(t testing.TB, query string, to ...any) {
	t.Helper()
	if err := e.db.QueryRow(query).Scan(to...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// now reads the clock that judges expiry.
func (e *env) now(t testing.TB) time.Time {
	t.Helper()
	if e.clock != nil {
		return e.clock.Now()
	}
	query := "SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000"
	if e.postgres() {
		query = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
	}
	var micros int64
	e.scan(t, query, &micros)
	return time.UnixMicro(micros)
}

// tick is how much longer than its TTL a grant may last: SQLite's clock counts
// milliseconds.
func (e *env) tick() time.Duration {
	if e.clock != nil || e.postgres() {
		return 0
	}
	return time.Millisecond
}

// ttl is long enough for what a test does while the lease is live, and short
// enough to wait for.
func (e *env) ttl() time.Duration {
	if e.clock != nil {
		return 30 * time.Second
	}
	return 300 * time.Millisecond
}

// pass lets the clock that judges expiry reach at: exactly, if it is a given one.
func (e *env) pass(t testing.TB, at time.Time) {
	t.Helper()
	if e.clock != nil {
		e.clock.set(at)
		return
	}
	eventually(t, "the database's clock passes "+at.String(), func() bool { return !e.now(t).Before(at) })
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// asksAgain waits until statements about table have been sent several times from now on, one
// after the other: a caller that finds a row locked asks for it again. Meanwhile no more than
// blocked of them may wait for another transaction.
func (e *env) asksAgain(t testing.TB, table string, blocked int) {
	t.Helper()
	query := "SELECT coalesce((extract(epoch FROM max(query_start)) * 1000000)::bigint, 0), count(*) FILTER (WHERE wait_event IN ('transactionid', 'tuple'))" +
		" FROM pg_stat_activity WHERE datname = current_database() AND query NOT LIKE '%pg_stat_activity%' AND query LIKE '%" + table + "%'"
	var last, sent int64
	times := -1 // The first look only tells what was sent before.
	eventually(t, "statements about "+table+" are sent again", func() bool {
		var waiting int
		e.scan(t, query, &sent, &waiting)
		if waiting > blocked {
			t.Fatalf("%d statements about %s wait for a lock, want %d", waiting, table, blocked)
		}
		if sent > last || times < 0 {
			last = sent
			times++
		}
		return times >= 4
	})
}

// blocked waits until n statements about table wait for a lock.
func (e *env) blocked(t testing.TB, table string, n int) {
	t.Helper()
	query := "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%" + table + "%'"
	eventually(t, fmt.Sprintf("%d statements about %s wait for a lock", n, table), func() bool {
		var waiting int
		e.scan(t, query, &waiting)
		return waiting == n
	})
}

// clock is a clock that stands still until it is set.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock {
	return &clock{now: time.Date(2031, 5, 17, 10, 30, 0, 123456000, time.UTC)}
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) set(to time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = to
}
