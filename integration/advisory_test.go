package integration

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// sessionLocks counts the advisory locks of the test's database.
func (e *env) sessionLocks(t testing.TB) (n int) {
	t.Helper()
	e.scan(t, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", &n)
	return n
}

// TestAdvisoryReleasesQueue: on a slow network the session has no time for all
// releases, one after the other. None of them leaves its lock held.
func TestAdvisoryReleasesQueue(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		p, through := newProxy(t, e)
		behind := *e
		behind.url = through
		cfg := e.config()
		cfg.Timeout = time.Second
		d, err := newCoord(t, behind.open(t), e.dialect, cfg).AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var locks []coord.DriverLock
		for i := range 400 {
			lock, err := d.Acquire(t.Context(), fmt.Sprint(i), time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			locks = append(locks, lock)
		}
		p.delay.Store(int64(10 * time.Millisecond))
		var all sync.WaitGroup
		for _, lock := range locks {
			all.Go(func() {
				if ok, err := d.Release(t.Context(), lock); err == nil && !ok {
					t.Errorf("Release(%s) = false", lock.Name)
				}
			})
		}
		all.Wait()
		p.delay.Store(0)
		eventually(t, "all locks are free", func() bool { return e.sessionLocks(t) == 0 })
		for _, lock := range locks {
			if _, err := d.Acquire(t.Context(), lock.Name, time.Hour); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestAdvisoryRefusedStatement: an error of the server about one name loses no other
// name, whether the statement had its effect or not.
func TestAdvisoryRefusedStatement(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		const call = "pg_try_advisory_lock((value ->> 0)::bigint)"
		fails := fmt.Sprintf("1 / (CASE WHEN (value ->> 0)::bigint = %d THEN 0 ELSE 1 END) = 1", coord.AdvisoryKey("bad"))
		for _, text := range []string{call + " AND " + fails, fails + " AND " + call} {
			dialect := copyDialect(t, e.dialect)
			file := dialect.files["advisory.sql"]
			file.Data = []byte(strings.Replace(string(file.Data), call, text, 1))
			d, err := newCoord(t, e.open(t), dialect, e.config()).AdvisoryDriver(coord.DriverConfig{})
			if err != nil {
				t.Fatal(err)
			}
			d.OnLost(func(names []string) { t.Errorf("OnLost(%v), want nothing", names) })
			kept, err := d.Acquire(t.Context(), "kept", time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if _, err := d.Acquire(t.Context(), "bad", time.Hour); err == nil || errors.Is(err, coord.ErrHeld) {
					t.Errorf("Acquire(bad) = %v, want the server's error", err)
				}
			}
			if ok, err := d.Extend(t.Context(), kept, time.Hour); !ok || err != nil {
				t.Errorf("Extend(kept) = %v, %v, want true", ok, err)
			}
			if n := e.sessionLocks(t); n != 1 {
				t.Errorf("%d locks on the server, want 1", n)
			}
			if ok, err := d.Release(t.Context(), kept); !ok || err != nil {
				t.Errorf("Release(kept) = %v, %v, want true", ok, err)
			}
		}
	})
}

// TestAdvisoryIdleSessionEnded: the next lock is granted all the same.
func TestAdvisoryIdleSessionEnded(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		d, err := e.coord(t).AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var told []string
		d.OnLost(func(names []string) { told = append(told, names...) })
		old, err := d.Acquire(t.Context(), "a", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		var killed int
		e.scan(t, "SELECT count(pg_terminate_backend(pid)) FROM (SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS holders", &killed)
		eventually(t, "the session has ended", func() bool { return e.sessionLocks(t) == 0 })
		if _, err := d.Acquire(t.Context(), "b", time.Hour); killed != 1 || err != nil {
			t.Fatalf("Acquire after %d sessions were ended = %v", killed, err)
		}
		if !slices.Equal(told, []string{"a"}) {
			t.Errorf("OnLost(%v), want a", told)
		}
		if _, err := d.Acquire(t.Context(), "a", time.Hour); err != nil {
			t.Fatal(err)
		}
		if ok, err := d.Release(t.Context(), old); ok || err != nil {
			t.Errorf("Release of the old session's lock = %v, %v, want false", ok, err)
		}
		if n := e.sessionLocks(t); n != 2 {
			t.Errorf("%d locks on the server, want 2", n)
		}
	})
}

// TestAdvisoryReleaseTwice: a lock that was released can't release the next of its
// name on the same session, and several are released by one statement.
func TestAdvisoryReleaseTwice(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		d, err := e.coord(t).AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			var locks []coord.DriverLock
			for i := range 10 {
				lock, err := d.Acquire(t.Context(), fmt.Sprint(i), time.Hour)
				if err != nil {
					t.Fatal(err)
				}
				locks = append(locks, lock)
			}
			var all sync.WaitGroup
			for _, lock := range locks {
				all.Go(func() {
					if ok, err := d.Release(t.Context(), lock); !ok || err != nil {
						t.Errorf("Release = %v, %v, want true", ok, err)
					}
				})
			}
			all.Wait()
			next, err := d.Acquire(t.Context(), "0", time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			if ok, err := d.Release(t.Context(), locks[0]); ok || err != nil {
				t.Errorf("Release again = %v, %v, want false", ok, err)
			}
			if n := e.sessionLocks(t); n != 1 {
				t.Errorf("%d locks on the server, want 1", n)
			}
			if ok, err := d.Release(t.Context(), next); !ok || err != nil {
				t.Errorf("Release = %v, %v, want true", ok, err)
			}
		}
	})
}

// TestPoolOfTwo: the connection for renewals is not kept if an advisory driver needs the other
// one, and a second driver, which would leave none, is refused.
func TestPoolOfTwo(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		db := e.open(t)
		db.SetMaxOpenConns(2)
		c := newCoord(t, db, e.dialect, e.config())
		heartbeat := func() {
			t.Helper()
			if _, err := c.Members().Heartbeat(t.Context(), "web", "a", "", time.Hour, nil); err != nil {
				t.Errorf("Heartbeat = %v", err)
			}
		}
		heartbeat() // Its connection is kept.
		d, err := c.AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"a", "b"} {
			if _, err := d.Acquire(t.Context(), name, time.Hour); err != nil {
				t.Errorf("Acquire(%s) = %v", name, err)
			}
			heartbeat()
		}
		if _, err := db.ExecContext(t.Context(), "SELECT 1"); err != nil {
			t.Errorf("the application's own statement = %v", err)
		}
		if _, err := c.AdvisoryDriver(coord.DriverConfig{}); !errors.Is(err, coord.ErrInvalid) {
			t.Errorf("a second driver = %v, want ErrInvalid", err)
		}
	})
}
