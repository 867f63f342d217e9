package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// backend is the server process of the session that last ran one of coord's
// statements.
func backend(t *testing.T, e *env) (pid int) {
	t.Helper()
	e.scan(t, "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query NOT LIKE '%pg_stat_activity%' AND query LIKE '%coord_lease%' ORDER BY query_start DESC LIMIT 1", &pid)
	return pid
}

func TestSessionKilled(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		db := e.open(t)
		s := newCoord(t, db, e.dialect, e.config()).Leases()
		grant(t, s, "a", time.Hour)
		if leases, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour); len(leases) != 1 || err != nil {
			t.Fatalf("Renew = %v, %v", leases, err)
		}
		pid := backend(t, e)
		var killed bool
		if err := e.db.QueryRow("SELECT pg_terminate_backend($1)", pid).Scan(&killed); err != nil || !killed {
			t.Fatalf("pg_terminate_backend(%d) = %v, %v", pid, killed, err)
		}
		eventually(t, "the backend is gone", func() (gone bool) {
			e.scan(t, fmt.Sprintf("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %d", pid), &gone)
			return gone
		})
		_, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour)
		if err == nil || errors.Is(err, coord.ErrLost) || errors.Is(err, coord.ErrHeld) {
			t.Fatalf("Renew on a killed connection = %v, want the driver's error", err)
		}
		t.Logf("the driver's error: %v", err)
		if leases, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour); len(leases) != 1 || err != nil {
			t.Fatalf("the next Renew = %v, %v, want the lease", leases, err)
		}
		if n := db.Stats().OpenConnections; n > 2 {
			t.Errorf("%d connections are open, want the dead one discarded", n)
		}
	})
}

// TestSessionOutlivesItsCallers: a cancelled caller leaves the session alive.
func TestSessionOutlivesItsCallers(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		db := e.open(t)
		s := newCoord(t, db, e.dialect, e.config()).Leases()
		grant(t, s, "a", time.Hour)
		renew := func(ctx context.Context) renewal {
			leases, err := s.Renew(ctx, "jobs", []int{3}, "a", time.Hour)
			return renewal{leases, err}
		}
		if r := renew(t.Context()); r.err != nil { // Prepares it on the session: a lock on the table stops a Prepare too.
			t.Fatal(r.err)
		}
		pid := backend(t, e)

		if _, err := s.Acquire(t.Context(), "jobs", 3, "b", time.Hour); !errors.Is(err, coord.ErrHeld) {
			t.Errorf("Acquire by another = %v, want ErrHeld", err)
		}
		done, cancel := context.WithCancel(t.Context())
		cancel()
		if r := renew(done); !errors.Is(r.err, context.Canceled) {
			t.Errorf("Renew under a cancelled context = %v, want context.Canceled", r.err)
		}

		// Cancelled while a row is locked: the caller, who asks for it again, leaves.
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec("SELECT FROM coord_lease FOR UPDATE"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first, second := make(chan renewal, 1), make(chan renewal, 1)
		go func() { first <- renew(ctx) }()
		e.asksAgain(t, "coord_lease", 0)
		cancel()
		if r := <-first; !errors.Is(r.err, context.Canceled) {
			t.Errorf("Renew of a row that is locked = %v, %v, want context.Canceled", r.leases, r.err)
		}

		// Cancelled in mid-statement: the caller waits and gets its result.
		tx.Rollback()
		if tx, err = e.db.Begin(); err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec("LOCK TABLE coord_lease"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		go func() { first <- renew(ctx) }()
		e.blocked(t, "coord_lease", 1)
		go func() { second <- renew(ctx) }() // It can only queue.
		cancel()
		if r := <-second; !errors.Is(r.err, context.Canceled) {
			t.Errorf("Renew that was queued = %v, %v, want context.Canceled at once", r.leases, r.err)
		}
		tx.Rollback()
		if r := <-first; len(r.leases) != 1 || r.err != nil {
			t.Errorf("Renew that was sent = %v, %v, want its result", r.leases, r.err)
		}
		if r := renew(t.Context()); r.err != nil {
			t.Fatal(r.err)
		}
		if now := backend(t, e); now != pid {
			t.Errorf("the backend is %d, was %d: the session was lost", now, pid)
		}
	})
}

// TestReleaseAfterTheContext: a release goes through though its caller's context
// has ended.
func TestReleaseAfterTheContext(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		grant(t, c.Leases(), "a", time.Hour)
		if _, err := c.Members().Heartbeat(t.Context(), "web", "a", "", time.Hour, nil); err != nil {
			t.Fatal(err)
		}
		done, cancel := context.WithCancel(t.Context())
		cancel()
		if ok, err := c.Leases().Release(done, "jobs", 3, "a"); !ok || err != nil {
			t.Errorf("Release = %v, %v, want true", ok, err)
		}
		if err := c.Members().Leave(done, "web", "a"); err != nil {
			t.Errorf("Leave = %v", err)
		}
		if members, err := c.Members().List(t.Context(), "web"); len(members) != 0 || err != nil {
			t.Errorf("List = %v, %v, want nobody", members, err)
		}
	})
}

// TestExhaustedPool: a renewal does not wait for connections that the application
// has borrowed.
func TestExhaustedPool(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		db := e.open(t)
		db.SetMaxOpenConns(3)
		s := newCoord(t, db, e.dialect, e.config()).Leases()
		grant(t, s, "a", time.Hour)
		for range 2 {
			conn, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if leases, err := s.Renew(ctx, "jobs", []int{3}, "a", time.Hour); len(leases) != 1 || err != nil {
			t.Fatalf("Renew = %v, %v, want the lease", leases, err)
		}
	})
}

// TestSmallPool: a pool limited to one connection is not pinned.
func TestSmallPool(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		db.SetMaxOpenConns(1)
		useEverything(t, newCoord(t, db, e.dialect, e.config()))
		c := newCoord(t, db, e.dialect, e.config())
		lease := grant(t, c.Leases(), "a", time.Hour)
		if n := db.Stats().InUse; n != 0 {
			t.Fatalf("%d connections are borrowed between operations, want 0", n)
		}
		err := inTx(t, db, nil, func(tx *sql.Tx) error {
			if err := c.Leases().Guard(t.Context(), tx, lease); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			if _, err := c.Leases().Renew(ctx, "jobs", []int{3}, "a", time.Hour); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Renew while the only connection is in use = %v, want DeadlineExceeded", err)
			}
			return nil
		})
		if err != nil {
			t.Errorf("Guard on the only connection = %v", err)
		}
	})
}

// TestSQLiteInMemoryOfOneConnection: the commonest database of tests.
func TestSQLiteInMemoryOfOneConnection(t *testing.T) {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	useEverything(t, newCoord(t, db, coord.SQLite, coord.Config{}))
}

// TestCloseReturnsTheConnection: healthy, without statements, to the pool.
func TestCloseReturnsTheConnection(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		db := e.open(t)
		c := newCoord(t, db, e.dialect, e.config())
		grant(t, c.Leases(), "a", time.Hour)
		if leases, err := c.Leases().Renew(t.Context(), "jobs", []int{3}, "a", time.Hour); len(leases) != 1 || err != nil {
			t.Fatalf("Renew = %v, %v, want the lease", leases, err)
		}
		if n := db.Stats().InUse; n != 1 {
			t.Errorf("%d connections are borrowed, want the pinned one", n)
		}
		for range 2 {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if stats := db.Stats(); stats.InUse != 0 || stats.Idle != 1 && stats.Idle != 2 {
			t.Errorf("after Close: %+v, want nothing in use and the connections idle", stats)
		}
		if e.name == "postgres-pq" {
			var prepared int
			if err := db.QueryRow("SELECT count(*) FROM pg_prepared_statements").Scan(&prepared); err != nil || prepared > 0 {
				t.Errorf("%d statements are left prepared, %v, want 0", prepared, err)
			}
		}
		_, acquire := c.Leases().Acquire(t.Context(), "jobs", 0, "o", time.Hour)
		_, renew := c.Leases().Renew(t.Context(), "jobs", []int{0}, "o", time.Hour)
		_, release := c.Leases().Release(t.Context(), "jobs", 0, "o")
		_, owners := c.Leases().Owners(t.Context(), "jobs")
		_, heartbeat := c.Members().Heartbeat(t.Context(), "web", "a", "", time.Hour, nil)
		leave := c.Members().Leave(t.Context(), "web", "a")
		_, list := c.Members().List(t.Context(), "web")
		_, purge := c.Purge(t.Context(), 0)
		guard := inTx(t, db, nil, func(tx *sql.Tx) error {
			return c.Leases().Guard(t.Context(), tx, coord.Lease{Group: "jobs", Owner: "o", Epoch: 1})
		})
		for op, err := range map[string]error{"Acquire": acquire, "Renew": renew, "Release": release, "Owners": owners, "Heartbeat": heartbeat,
			"Leave": leave, "List": list, "Purge": purge, "Guard": guard, "Migrate": c.Migrate(t.Context())} {
			if !errors.Is(err, coord.ErrClosed) {
				t.Errorf("%s after Close = %v, want ErrClosed", op, err)
			}
		}
	})
}
