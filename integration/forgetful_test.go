package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"sync/atomic"
	"testing"

	"github.com/seed-4c80c132/coord"
)

// forgetful is a driver that once, when armed, does what it is told and then says
// that the connection is bad, so that database/sql sends it again on another.
type forgetful struct {
	driver driver.Driver
	url    string
	armed  *atomic.Bool
}

func (d forgetful) Driver() driver.Driver { return d.driver }

func (d forgetful) Connect(context.Context) (driver.Conn, error) {
	conn, err := d.driver.Open(d.url)
	return forgetfulConn{conn, d.armed}, err
}

type forgetfulConn struct {
	driver.Conn
	armed *atomic.Bool
}

func (c forgetfulConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

func (c forgetfulConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	result, err := c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
	if err == nil && c.armed.CompareAndSwap(true, false) {
		return nil, driver.ErrBadConn
	}
	return result, err
}

// TestNarrowSentTwice: the second finds the dropped ids freed by the first, or taken,
// and the others still held.
func TestNarrowSentTwice(t *testing.T) {
	eachEngine(t, func(t *testing.T, env *env) {
		var armed atomic.Bool
		if err := env.db.PingContext(t.Context()); err != nil { // A database in memory lasts as long as a connection.
			t.Fatal(err)
		}
		db := sql.OpenDB(forgetful{env.db.Driver(), env.url, &armed})
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
