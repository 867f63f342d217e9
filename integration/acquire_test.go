package integration

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// acquisitions are one acquisition of each primitive, of what a former holder had.
var acquisitions = []struct {
	name   string
	table  string // has a live row once it was granted
	former func(ctx context.Context, c *coord.Coord) (guard func(*sql.Tx) error, err error)
	try    func(ctx context.Context, c *coord.Coord) error
}{
	{"lease", "coord_lease",
		func(ctx context.Context, c *coord.Coord) (func(*sql.Tx) error, error) {
			lease, err := c.Leases().Acquire(ctx, "jobs", 3, "former", formerTTL)
			return func(tx *sql.Tx) error { return c.Leases().Guard(ctx, tx, lease) }, err
		},
		func(ctx context.Context, c *coord.Coord) error {
			_, err := c.Leases().Acquire(ctx, "jobs", 3, "me", time.Hour)
			return err
		}},
	{"mutex", "coord_mutex",
		func(ctx context.Context, c *coord.Coord) (func(*sql.Tx) error, error) {
			m, err := tableMutex(c, coord.MutexConfig{TTL: formerTTL})
			if err != nil {
				return nil, err
			}
			lock, err := m.TryLock(ctx, "m")
			return func(tx *sql.Tx) error { return lock.Guard(ctx, tx) }, err
		},
		func(ctx context.Context, c *coord.Coord) error {
			m, err := tableMutex(c, coord.MutexConfig{TTL: time.Hour})
			if err == nil {
				_, err = m.TryLock(ctx, "m")
			}
			return err
		}},
	{"ids", "coord_eidlock",
		func(ctx context.Context, c *coord.Coord) (func(*sql.Tx) error, error) {
			l, err := c.EIDLocker(coord.EIDConfig{TTL: formerTTL})
			if err == nil {
				err = l.AcquireLocks(ctx, "former", "1", "2")
			}
			return func(tx *sql.Tx) error { return l.Guard(ctx, tx, "former") }, err
		},
		func(ctx context.Context, c *coord.Coord) error {
			l, err := c.EIDLocker(coord.EIDConfig{TTL: time.Hour})
			if err == nil {
				err = l.AcquireLocks(ctx, "me", "1", "2")
			}
			return err
		}},
}

// formerTTL is long enough for a former holder to guard what it has.
const formerTTL = 2 * time.Second

func tableMutex(c *coord.Coord, cfg coord.MutexConfig) (*coord.Mutex, error) {
	d, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		return nil, err
	}
	return coord.NewMutex(d, cfg)
}

// live counts the rows of a table that are held.
func (e *env) live(t *testing.T, table string) (n int) {
	t.Helper()
	query := "SELECT count(*) FROM " + table + " WHERE expires_at > 0"
	if e.postgres() {
		query = "SELECT count(*) FROM " + table + " WHERE expires_at > 'epoch'"
	}
	e.scan(t, query, &n)
	return n
}

// TestNeverSentAfterItsContext: an acquisition whose context ends while it waits for a
// connection of the pool is not sent when there is one.
func TestNeverSentAfterItsContext(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		for _, op := range acquisitions {
			if err := e.coord(t).Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			db := e.open(t)
			c := newCoord(t, db, e.dialect, e.config())
			if err := c.Migrate(t.Context()); err != nil { // First uses are another matter.
				t.Fatal(err)
			}
			db.SetMaxOpenConns(1)
			conn, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			began := time.Now()
			if err := op.try(ctx, c); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, coord.ErrHeld) {
				t.Errorf("%s on a pool that is used up = %v, want DeadlineExceeded alone", op.name, err)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("%s took %v, want to return with its context", op.name, took)
			}
			conn.Close()
			eventually(t, "nothing is borrowed", func() bool { return db.Stats().InUse == 0 })
			if n := e.live(t, op.table); n != 0 {
				t.Errorf("%s: %d rows are held by nobody", op.name, n)
			}
		}
	})
}

// TestOpenGuardPilesNothingUp: callers that try again and again, with little time each,
// for what an open guard of a former holder keeps, use a connection or two, and what else
// the process holds is not lost.
func TestOpenGuardPilesNothingUp(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		for _, op := range acquisitions {
			t.Run(op.name, func(t *testing.T) {
				former := newCoord(t, e.open(t), e.dialect, e.config())
				guard, err := op.former(t.Context(), former)
				if err != nil {
					t.Fatal(err)
				}
				tx, err := e.db.Begin()
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				if err := guard(tx); err != nil {
					t.Fatal(err)
				}
				former.Close() // Nobody renews it.
				eventually(t, "the former holder's time is over", func() (over bool) {
					e.scan(t, "SELECT count(*) = 0 FROM "+op.table+" WHERE expires_at > clock_timestamp()", &over)
					return over
				})
				db := e.open(t)
				c := newCoord(t, db, e.dialect, e.config())
				m, err := tableMutex(c, coord.MutexConfig{TTL: 3 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				other, err := m.Lock(t.Context(), "unrelated "+op.name)
				if err != nil {
					t.Fatal(err)
				}
				most := 0
				for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
					ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
					if err := op.try(ctx, c); err == nil {
						t.Fatal("granted in spite of an open guard")
					}
					cancel()
					most = max(most, db.Stats().OpenConnections)
				}
				if most > 6 {
					t.Errorf("%d connections were open at once, want a few", most)
				}
				tx.Rollback()
				eventually(t, "it is granted once the guard has ended", func() bool { return op.try(t.Context(), c) == nil })
				if err := other.Unlock(t.Context()); err != nil {
					t.Errorf("Unlock of another lock = %v", err)
				}
			})
		}
	})
}

// TestLockedRowsHoldUpNoRenewal: a row of a member, a lease or a mutex that another
// transaction has locked is passed over, and the others are renewed.
func TestLockedRowsHoldUpNoRenewal(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		cfg := e.config()
		cfg.Timeout = time.Second
		c := newCoord(t, e.open(t), e.dialect, cfg)
		if _, err := c.Members().Heartbeat(t.Context(), "web", "a", "", time.Hour, nil); err != nil {
			t.Fatal(err)
		}
		s := c.Leases()
		for p := range 2 {
			if _, err := s.Acquire(t.Context(), "jobs", p, "a", time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		m, err := tableMutex(c, coord.MutexConfig{TTL: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		var locks []*coord.Lock
		for _, name := range []string{"locked", "free"} {
			lock, err := m.Lock(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			locks = append(locks, lock)
		}
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		for _, query := range []string{"SELECT FROM coord_member FOR UPDATE", "SELECT FROM coord_lease WHERE partition = 0 FOR UPDATE", "SELECT FROM coord_mutex WHERE name = 'locked' FOR UPDATE"} {
			if _, err := tx.Exec(query); err != nil {
				t.Fatal(err)
			}
		}
		beats := make(chan error, 4)
		for range 4 {
			go func() {
				_, err := c.Members().Heartbeat(t.Context(), "web", "a", "", time.Hour, nil)
				beats <- err
			}()
		}
		for end := time.Now().Add(4 * time.Second); time.Now().Before(end); {
			leases, err := s.Renew(t.Context(), "jobs", []int{1}, "a", time.Hour)
			if len(leases) != 1 || err != nil {
				t.Fatalf("Renew of a row that is free = %v, %v", leases, err)
			}
		}
		if leases, err := s.Renew(t.Context(), "jobs", []int{0, 1}, "a", time.Hour); err == nil {
			t.Errorf("Renew of a row that is locked = %v, want an error: it is not lost", leases)
		}
		for range 4 {
			if err := <-beats; err == nil {
				t.Error("Heartbeat of a row that is locked succeeded")
			}
		}
		if err := locks[1].Err(); err != nil {
			t.Errorf("the lock whose row is free: %v", err)
		}
		tx.Rollback()
		if leases, err := s.Renew(t.Context(), "jobs", []int{0, 1}, "a", time.Hour); len(leases) != 2 || err != nil {
			t.Errorf("Renew afterwards = %v, %v, want both", leases, err)
		}
		if err := locks[1].Unlock(t.Context()); err != nil {
			t.Errorf("Unlock = %v", err)
		}
	})
}

// TestConnectionIsReplaced: after errors that are not the statement's own doing the pinned
// connection is another.
func TestConnectionIsReplaced(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		for _, test := range []struct{ name, hurt, heal string }{
			{"read-only", "ALTER DATABASE SET default_transaction_read_only = on", "ALTER DATABASE RESET default_transaction_read_only"},
			{"columns of another type", "ALTER TABLE coord_lease ALTER COLUMN epoch TYPE numeric", "ALTER TABLE coord_lease ALTER COLUMN epoch TYPE bigint"},
		} {
			t.Run(test.name, func(t *testing.T) {
				s := newCoord(t, e.open(t), e.dialect, e.config()).Leases()
				grant(t, s, "a", time.Hour)
				var database string
				e.scan(t, "SELECT quote_ident(current_database())", &database)
				change := func(text string) {
					t.Helper()
					text = strings.ReplaceAll(text, "DATABASE", "DATABASE "+database)
					e.exec(t, "SET default_transaction_read_only = off; "+text)
				}
				change(test.hurt)
				e.exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE '%coord_lease%'")
				for range 3 {
					_, _ = s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour)
				}
				change(test.heal)
				eventually(t, "a renewal comes through", func() bool {
					leases, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour)
					return err == nil && len(leases) == 1
				})
				if _, err := s.Release(t.Context(), "jobs", 3, "a"); err != nil {
					t.Fatal(err)
				}
			})
		}
	})
}
