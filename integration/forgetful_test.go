package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// forgetful is a driver that once, when armed, does what it is told and then says
// that the connection is bad, so that database/sql sends it again on another, or fails
// otherwise.
type forgetful struct {
	driver driver.Driver
	url    string
	armed  *atomic.Bool
	err    error
}

func (d forgetful) Driver() driver.Driver { return d.driver }

func (d forgetful) Connect(context.Context) (driver.Conn, error) {
	conn, err := d.driver.Open(d.url)
	return forgetfulConn{conn, d}, err
}

type forgetfulConn struct {
	driver.Conn
	d forgetful
}

func (c forgetfulConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

func (c forgetfulConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	result, err := c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
	if err == nil && c.d.armed.CompareAndSwap(true, false) {
		return nil, c.d.err
	}
	return result, err
}

// TestReleaseSentTwice: the reply to a release is lost. The second finds that the first was its own.
func TestReleaseSentTwice(t *testing.T) {
	eachEngine(t, func(t *testing.T, env *env) {
		for _, failure := range []error{driver.ErrBadConn, sql.ErrConnDone} {
			var armed atomic.Bool
			if err := env.db.PingContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			db := sql.OpenDB(forgetful{env.db.Driver(), env.url, &armed, failure})
			t.Cleanup(func() { db.Close() })
			cfg := env.config()
			cfg.NoPrepare = true
			c := newCoord(t, db, env.dialect, cfg)
			lease, err := c.Leases().Acquire(t.Context(), "jobs", 3, "o", time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			armed.Store(true)
			if ok, err := c.Leases().Release(t.Context(), "jobs", 3, "o"); !ok || err != nil || armed.Load() {
				t.Errorf("Release of a lease = %v, %v, want true", ok, err)
			}
			if ok, err := c.Leases().Release(t.Context(), "jobs", 3, "o"); ok || err != nil {
				t.Errorf("Release of a lease again = %v, %v, want false", ok, err)
			}
			if again, err := c.Leases().Acquire(t.Context(), "jobs", 3, "o", time.Hour); err != nil || again.Epoch != lease.Epoch+1 {
				t.Errorf("Acquire afterwards = %+v, %v, want epoch %d", again, err, lease.Epoch+1)
			}
			m, err := tableMutex(c, coord.MutexConfig{})
			if err != nil {
				t.Fatal(err)
			}
			lock, err := m.Lock(t.Context(), "m")
			if err != nil {
				t.Fatal(err)
			}
			armed.Store(true)
			if err := lock.Unlock(t.Context()); err != nil || armed.Load() {
				t.Errorf("Unlock = %v", err)
			}
		}
	})
}

// TestNarrowSentTwice: the second finds the dropped ids freed by the first, or taken,
// and the others still held.
func TestNarrowSentTwice(t *testing.T) {
	eachEngine(t, func(t *testing.T, env *env) {
		var armed atomic.Bool
		if err := env.db.PingContext(t.Context()); err != nil { // A database in memory lasts as long as a connection.
			t.Fatal(err)
		}
		db := sql.OpenDB(forgetful{env.db.Driver(), env.url, &armed, driver.ErrBadConn})
		t.Cleanup(func() { db.Close() })
		cfg := env.config()
		cfg.NoPrepare = true
		c := newCoord(t, db, env.dialect, cfg)
		l, err := c.EIDLocker(coord.EIDConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.AcquireLocks(t.Context(), "a", "1", "2", "3"); err != nil {
			t.Fatal(err)
		}
		lost := l.Lost("a")
		armed.Store(true)
		if err := l.AcquireLocks(t.Context(), "a", "2"); err != nil || armed.Load() {
			t.Fatalf("AcquireLocks of fewer = %v, want it sent twice", err)
		}
		if err := l.AssertLocksHeld(t.Context(), "a"); err != nil || l.Lost("a") != lost {
			t.Errorf("AssertLocksHeld = %v, want the same locks, fewer", err)
		}
		select {
		case <-lost:
			t.Error("the locks were lost")
		default:
		}
	})
}
