package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// modes are the ways to keep a mutex.
var modes = []string{"table", "advisory"}

func newDriver(c *coord.Coord, mode string, cfg coord.DriverConfig) (coord.MutexDriver, error) {
	if mode == "advisory" {
		return c.AdvisoryDriver(cfg)
	}
	return c.TableDriver(cfg)
}

// eachMutex runs test in every mode on every engine that has it.
func eachMutex(t *testing.T, test func(t *testing.T, e *env, mode string)) {
	eachEngine(t, func(t *testing.T, e *env) {
		for _, mode := range modes {
			if mode == "table" || e.postgres() && !e.pooler {
				t.Run(mode, func(t *testing.T) { test(t, e, mode) })
			}
		}
	})
}

// mutexDriver returns a driver on a Coord and a pool of its own.
func (e *env) mutexDriver(t testing.TB, mode string) coord.MutexDriver {
	t.Helper()
	d, err := newDriver(newCoord(t, e.open(t), e.dialect, e.config()), mode, coord.DriverConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func newMutex(t testing.TB, d coord.MutexDriver, cfg coord.MutexConfig) *coord.Mutex {
	t.Helper()
	m, err := coord.NewMutex(d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// useMutex calls every operation of a driver and of a mutex on it once, in an order
// in which each succeeds.
func useMutex(t *testing.T, d coord.MutexDriver) {
	t.Helper()
	ctx := t.Context()
	lock, err := d.Acquire(ctx, "m", time.Hour)
	if err != nil || lock.Name != "m" {
		t.Fatalf("Acquire = %+v, %v", lock, err)
	}
	if _, err := d.Acquire(ctx, "m", time.Hour); !errors.Is(err, coord.ErrHeld) {
		t.Fatalf("Acquire again = %v, want ErrHeld", err)
	}
	if ok, err := d.Extend(ctx, lock, time.Hour); !ok || err != nil {
		t.Fatalf("Extend = %v, %v, want true", ok, err)
	}
	for _, want := range []bool{true, false} {
		if ok, err := d.Release(ctx, lock); ok != want || err != nil {
			t.Fatalf("Release = %v, %v, want %v", ok, err, want)
		}
	}
	if ok, err := d.Extend(ctx, lock, time.Hour); ok || err != nil {
		t.Fatalf("Extend after Release = %v, %v, want false", ok, err)
	}
	m := newMutex(t, d, coord.MutexConfig{})
	err = m.Do(ctx, "m", func(ctx context.Context, lock *coord.Lock) error {
		if _, err := m.TryLock(ctx, "m"); !errors.Is(err, coord.ErrHeld) {
			return fmt.Errorf("TryLock of a lock that is held = %w, want ErrHeld", err)
		}
		return lock.Err()
	})
	if err != nil {
		t.Fatalf("Do = %v", err)
	}
}

func TestMutexDrivers(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) { useMutex(t, e.mutexDriver(t, mode)) })
}

// TestTableDriverStates: every operation in every state, with both clocks.
func TestTableDriverStates(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		d, rival := e.mutexDriver(t, "table"), e.mutexDriver(t, "table")
		get := func(d coord.MutexDriver, ttl time.Duration) coord.DriverLock {
			t.Helper()
			lock, err := d.Acquire(t.Context(), "m", ttl)
			if err != nil {
				t.Fatal(err)
			}
			return lock
		}
		expire := func() { e.pass(t, e.now(t).Add(20*time.Millisecond+e.tick())) }
		const short = 20 * time.Millisecond
		for _, state := range []struct {
			name                                string
			make                                func() coord.DriverLock // the lock that is extended, released and guarded
			acquire, extend, release, isGuarded bool
		}{
			{"held", func() coord.DriverLock { return get(d, time.Hour) }, false, true, true, true},
			{"expired", func() coord.DriverLock { l := get(d, short); expire(); return l }, true, true, true, false},
			{"released", func() coord.DriverLock { l := get(d, time.Hour); d.Release(t.Context(), l); return l }, true, false, false, false},
			{"expired and taken", func() coord.DriverLock { l := get(d, short); expire(); get(rival, time.Hour); return l }, false, false, false, false},
			{"taken by itself", func() coord.DriverLock { l := get(d, short); expire(); get(d, time.Hour); return l }, false, false, false, false},
			{"taken and released", func() coord.DriverLock {
				l := get(d, short)
				expire()
				rival.Release(t.Context(), get(rival, time.Hour))
				return l
			}, true, false, false, false},
		} {
			t.Run(state.name, func(t *testing.T) {
				fresh := func() coord.DriverLock {
					t.Helper()
					if _, err := e.db.Exec("DELETE FROM coord_mutex"); err != nil {
						get(d, short) // Makes the table.
						e.exec(t, "DELETE FROM coord_mutex")
					}
					return state.make()
				}
				old := fresh()
				for _, by := range []coord.MutexDriver{d, rival} {
					old = fresh()
					l, err := by.Acquire(t.Context(), "m", time.Hour)
					if state.acquire != (err == nil) || err != nil && !errors.Is(err, coord.ErrHeld) {
						t.Errorf("Acquire = %v, want it to succeed: %v", err, state.acquire)
					}
					if err == nil && l.Fence <= old.Fence {
						t.Errorf("Acquire: token %d after %d", l.Fence, old.Fence)
					}
					var held *coord.HeldError
					if err != nil && (!errors.As(err, &held) || held.Owner == "" || held.What != "mutex m" || held.ExpiresAt.IsZero()) {
						t.Errorf("Acquire = %+v, want to be told the holder", err)
					}
				}
				old = fresh()
				if ok, err := d.Extend(t.Context(), old, time.Hour); ok != state.extend || err != nil {
					t.Errorf("Extend = %v, %v, want %v", ok, err, state.extend)
				}
				if state.extend {
					if _, err := rival.Acquire(t.Context(), "m", time.Hour); !errors.Is(err, coord.ErrHeld) {
						t.Errorf("Acquire after Extend = %v, want ErrHeld", err)
					}
				}
				old = fresh()
				if ok, err := d.Release(t.Context(), old); ok != state.release || err != nil {
					t.Errorf("Release = %v, %v, want %v", ok, err, state.release)
				}
				if ok, err := d.Release(t.Context(), old); ok || err != nil {
					t.Errorf("Release again = %v, %v, want false", ok, err)
				}
			})
		}
	})
}

// TestTokensGrow: across release, expiry and purge, also when an acquisition is
// held up right before it inserts.
func TestTokensGrow(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		d, err := c.TableDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		last := int64(0)
		for i := range 30 {
			lock, err := d.Acquire(t.Context(), "m", 5*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			if lock.Fence <= last {
				t.Fatalf("token %d after %d", lock.Fence, last)
			}
			last = lock.Fence
			switch i % 3 {
			case 0:
				d.Release(t.Context(), lock)
			case 1:
				e.pass(t, e.now(t).Add(5*time.Millisecond+e.tick()))
			case 2:
				d.Release(t.Context(), lock)
				if n, err := c.Purge(t.Context(), time.Hour); n != 1 || err != nil {
					t.Fatalf("Purge of a released lock = %d, %v, want 1", n, err)
				}
			}
		}
	})
}

func TestStalledAcquirer(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		d := e.mutexDriver(t, "table")
		if err := c.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		// A caller that inserts while the gate is shut waits right before the row is its own, for
		// longer than an acquisition waits for a rival.
		e.exec(t, `CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
			CREATE TRIGGER stall BEFORE INSERT ON coord_mutex FOR EACH ROW WHEN (current_setting('application_name') = 'slow') EXECUTE FUNCTION stall()`)
		slow := *e
		slow.url += "&application_name=slow"
		stalled := slow.mutexDriver(t, "table")
		gate, err := e.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer gate.Close()
		for range 5 {
			c.Purge(t.Context(), 0)
			if _, err := gate.ExecContext(t.Context(), "SELECT pg_advisory_lock(1)"); err != nil {
				t.Fatal(err)
			}
			type result struct {
				lock coord.DriverLock
				err  error
			}
			got := make(chan result, 1)
			go func() {
				lock, err := stalled.Acquire(context.Background(), "m", time.Hour)
				got <- result{lock, err}
			}()
			eventually(t, "the acquirer stalls", func() (waits bool) {
				e.scan(t, "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'slow'", &waits)
				return waits
			})
			var last int64
			for range 3 {
				lock, err := d.Acquire(t.Context(), "m", time.Hour)
				if err != nil {
					t.Fatal(err)
				}
				last = lock.Fence
				d.Release(t.Context(), lock)
				c.Purge(t.Context(), 0)
			}
			if _, err := gate.ExecContext(t.Context(), "SELECT pg_advisory_unlock(1)"); err != nil {
				t.Fatal(err)
			}
			r := <-got
			if r.err != nil || r.lock.Fence <= last {
				t.Fatalf("the stalled Acquire = %+v, %v, want a token over %d", r.lock, r.err, last)
			}
			stalled.Release(t.Context(), r.lock)
		}
	})
}

// countUp is the role of a process that increments a row under the mutex, in
// several goroutines, and prints each token with it.
func countUp(o orders, db *sql.DB, c *coord.Coord) error {
	const goroutines = 8
	d, err := newDriver(c, o.Mode, coord.DriverConfig{})
	if err != nil {
		return err
	}
	ttl := 30 * time.Second
	if o.Random {
		ttl = 300 * time.Millisecond
	}
	m, err := coord.NewMutex(d, coord.MutexConfig{TTL: ttl, RetryMin: time.Millisecond, RetryMax: 20 * time.Millisecond})
	if err != nil {
		return err
	}
	var left atomic.Int64
	left.Store(int64(o.Count))
	errs := make(chan error, goroutines)
	for range goroutines {
		go func() {
			for left.Add(-1) >= 0 {
				if err := increment(o, db, c, m); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	var failure error
	for range goroutines {
		failure = errors.Join(failure, <-errs)
	}
	return failure
}

// increment reads the value and writes it back one larger. In random mode it may
// let the lock expire before it does so, and is then saved by its guard.
func increment(o orders, db *sql.DB, c *coord.Coord, m *coord.Mutex) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for {
		lock, err := m.Lock(ctx, "counter")
		if err != nil {
			return err
		}
		err = write(ctx, o, db, lock)
		if o.Random && rand.IntN(10) == 0 {
			if _, err := c.Purge(ctx, 0); err != nil {
				return err
			}
		}
		unlock := lock.Unlock(ctx)
		switch {
		case err == nil:
			return nil // Written: that the lock was lost afterwards does not matter.
		case !errors.Is(err, coord.ErrLost):
			return errors.Join(err, unlock)
		}
	}
}

func write(ctx context.Context, o orders, db *sql.DB, lock *coord.Lock) error {
	if !o.Random { // Nothing but the mutex protects the value.
		var value int
		if err := db.QueryRowContext(ctx, "SELECT value FROM counter").Scan(&value); err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, "INSERT INTO tokens (fence) VALUES ("+strconv.FormatInt(lock.Fence(), 10)+")"); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, "UPDATE counter SET value = "+strconv.Itoa(value+1))
		return err
	}
	if rand.IntN(20) == 0 { // Like a process that was stopped.
		if _, err := db.ExecContext(ctx, "UPDATE coord_mutex SET expires_at = "+expireNow(o)); err != nil {
			return err
		}
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := lock.Guard(ctx, tx); err != nil {
		return err
	}
	var value int
	if err := tx.QueryRowContext(ctx, "SELECT value FROM counter").Scan(&value); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE counter SET value = "+strconv.Itoa(value+1)); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO tokens (fence) VALUES ("+strconv.FormatInt(lock.Fence(), 10)+")"); err != nil {
		return err
	}
	return tx.Commit()
}

func expireNow(o orders) string {
	if strings.HasPrefix(o.Engine, "sqlite") {
		return "1 WHERE expires_at > 1"
	}
	return "clock_timestamp() WHERE expires_at > clock_timestamp()"
}

// TestCounter: 32 goroutines in 4 processes lose no increment, and tokens grow in
// the order of the grants.
func TestCounter(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) {
		if e.name == "sqlite-memory" {
			return // It is of one process.
		}
		for _, random := range []bool{false, true} {
			if random && mode == "advisory" {
				continue // Nothing expires there.
			}
			t.Run(fmt.Sprint("random=", random), func(t *testing.T) {
				const processes = 4
				increments := 2000
				if e.pooler {
					increments = 400
				}
				id := "bigserial PRIMARY KEY"
				if !e.postgres() {
					id = "INTEGER PRIMARY KEY"
				}
				e.exec(t, "DROP TABLE IF EXISTS counter")
				e.exec(t, "DROP TABLE IF EXISTS tokens")
				e.exec(t, "CREATE TABLE counter (value int NOT NULL)")
				e.exec(t, "CREATE TABLE tokens (id "+id+", fence bigint NOT NULL)")
				e.exec(t, "INSERT INTO counter VALUES (0)")
				var wg sync.WaitGroup
				for range processes {
					p := e.start(t, "counter", orders{Mode: mode, Count: increments / processes, Random: random})
					wg.Go(func() { p.wait(t, func(line string) { t.Error(line) }) })
				}
				wg.Wait()
				var value int
				e.scan(t, "SELECT value FROM counter", &value)
				if value != increments {
					t.Errorf("value = %d, want %d", value, increments)
				}
				if mode == "table" {
					checkTokens(t, e)
				}
			})
		}
	})
}

func checkTokens(t *testing.T, e *env) {
	t.Helper()
	rows, err := e.db.Query("SELECT fence FROM tokens ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var last, fence int64
	n := 0
	for ; rows.Next(); n++ {
		if err := rows.Scan(&fence); err != nil {
			t.Fatal(err)
		}
		if fence <= last {
			t.Fatalf("token %d was written after %d", fence, last)
		}
		last = fence
	}
	if err := rows.Err(); err != nil || n == 0 {
		t.Errorf("%d tokens, %v", n, err)
	}
}

// TestBlackHole: the holder notices its loss before another can have the lock,
// though its driver may hang, and its guarded write never lands after that.
func TestBlackHole(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		e.exec(t, "CREATE TABLE written (by text)")
		const runs = 20
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for run := range runs { // Side by side, since each takes as long as the TTL.
			wg.Go(func() { fallIntoBlackHole(t, e, fmt.Sprint("m", run)) })
		}
		wg.Wait()
		var written int
		e.scan(t, "SELECT count(*) FROM written WHERE by = 'old'", &written)
		if written != 0 {
			t.Errorf("%d writes of old holders landed after the takeover, want 0", written)
		}
	})
}

func fallIntoBlackHole(t *testing.T, e *env, name string) {
	p, through := newProxy(t, e)
	behind := *e
	behind.url = through
	db, err := sql.Open(e.driver, through)
	if err != nil {
		t.Error(err)
		return
	}
	t.Cleanup(func() { p.close(); db.Close() })
	cfg := coord.Config{}
	config := coord.MutexConfig{TTL: 3 * time.Second}
	old := newCoord(t, db, e.dialect, cfg)
	d, err := old.TableDriver(coord.DriverConfig{})
	if err != nil {
		t.Error(err)
		return
	}
	holder := newMutex(t, d, config)
	waiter := newMutex(t, e.mutexDriver(t, "table"), config)
	lock, err := holder.Lock(t.Context(), name)
	if err != nil {
		t.Error(err)
		return
	}
	tx, err := db.Begin() // Open before the network fails: its guard is still to come.
	if err != nil {
		t.Error(err)
		return
	}
	p.swallow()
	lost := make(chan time.Time, 1)
	go func() { <-lock.Done(); lost <- time.Now() }()
	taken, err := waiter.Lock(t.Context(), name)
	if err != nil {
		t.Errorf("Lock by the waiter = %v", err)
		return
	}
	now := time.Now()
	select {
	case at := <-lost:
		if at.After(now) || !errors.Is(lock.Err(), coord.ErrLost) {
			t.Errorf("%s: lost %v after the takeover: %v", name, at.Sub(now), lock.Err())
		}
	default:
		t.Errorf("%s: the holder has not noticed its loss when another has the lock", name)
	}
	if taken.Fence() <= lock.Fence() {
		t.Errorf("token %d after %d", taken.Fence(), lock.Fence())
	}
	go func() { // It hangs with lib/pq until the proxy closes.
		if lock.Guard(context.Background(), tx) == nil {
			tx.Exec("INSERT INTO written VALUES ('old')")
			tx.Commit()
		}
		tx.Rollback()
	}()
	// The old holder also tries over a network that works.
	err = inTx(t, e.db, nil, func(tx *sql.Tx) error {
		if err := lock.Guard(t.Context(), tx); err != nil {
			return err
		}
		_, err := tx.Exec("INSERT INTO written VALUES ('old')")
		return err
	})
	if !errors.Is(err, coord.ErrLost) {
		t.Errorf("Guard of the old holder = %v, want ErrLost", err)
	}
	if err := lock.Unlock(t.Context()); !errors.Is(err, coord.ErrLost) {
		t.Errorf("Unlock of the old holder = %v, want ErrLost", err)
	}
	if err := taken.Unlock(t.Context()); err != nil {
		t.Errorf("Unlock of the new holder = %v", err)
	}
	p.close() // Or closing the Coord would wait for a driver that hangs.
}

// TestAdvisorySessionKilled: all its locks are lost, once, and none of them can
// touch a lock of the next session.
func TestAdvisorySessionKilled(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		d := e.mutexDriver(t, "advisory")
		told := make(chan []string, 10)
		d.OnLost(func(names []string) { told <- names })
		m := newMutex(t, d, coord.MutexConfig{TTL: 3 * time.Second, Renew: 200 * time.Millisecond})
		var locks []*coord.Lock
		for _, name := range []string{"b", "a", "c"} {
			lock, err := m.Lock(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			locks = append(locks, lock)
		}
		direct, err := d.Acquire(t.Context(), "d", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		var killed int
		e.scan(t, "SELECT count(pg_terminate_backend(pid)) FROM (SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS holders", &killed)
		if killed != 1 {
			t.Fatalf("%d sessions hold the locks, want 1", killed)
		}
		for _, lock := range locks {
			select {
			case <-lock.Done():
			case <-time.After(20 * time.Second):
				t.Fatalf("%s is not lost", lock.Name())
			}
			if !errors.Is(lock.Err(), coord.ErrLost) {
				t.Errorf("%s: Err = %v, want ErrLost", lock.Name(), lock.Err())
			}
		}
		if names := <-told; !slices.Equal(names, []string{"a", "b", "c", "d"}) {
			t.Errorf("OnLost(%v), want a, b, c and d", names)
		}
		again, err := m.Lock(t.Context(), "a") // On a new session.
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Acquire(t.Context(), "d", time.Hour); err != nil {
			t.Fatal(err)
		}
		for _, lock := range locks {
			if err := lock.Unlock(t.Context()); !errors.Is(err, coord.ErrLost) {
				t.Errorf("Unlock(%s) = %v, want ErrLost", lock.Name(), err)
			}
		}
		if ok, err := d.Release(t.Context(), direct); ok || err != nil {
			t.Errorf("Release of a lock of the dead session = %v, %v, want false", ok, err)
		}
		if ok, err := d.Extend(t.Context(), direct, time.Hour); ok || err != nil {
			t.Errorf("Extend of a lock of the dead session = %v, %v, want false", ok, err)
		}
		rival := e.mutexDriver(t, "advisory")
		for _, name := range []string{"a", "d"} {
			if _, err := rival.Acquire(t.Context(), name, time.Hour); !errors.Is(err, coord.ErrHeld) {
				t.Errorf("Acquire(%s) by another = %v, want ErrHeld", name, err)
			}
		}
		if err := again.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case names := <-told:
			t.Errorf("OnLost was told again, of %v", names)
		default:
		}
	})
}

// TestAdvisoryClose: everything is freed and reported.
func TestAdvisoryClose(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		d := e.mutexDriver(t, "advisory")
		m := newMutex(t, d, coord.MutexConfig{})
		lock, err := m.Lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if <-lock.Done(); !errors.Is(lock.Err(), coord.ErrLost) {
			t.Errorf("Err after Close = %v, want ErrLost", lock.Err())
		}
		if _, err := m.Lock(t.Context(), "b"); !errors.Is(err, coord.ErrClosed) {
			t.Errorf("Lock after Close = %v, want ErrClosed", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		rival, err := newMutex(t, e.mutexDriver(t, "advisory"), coord.MutexConfig{}).Lock(ctx, "a")
		if err != nil {
			t.Fatalf("Lock by another after Close = %v", err)
		}
		rival.Unlock(t.Context())
	})
}

// TestTableClose: rows are left to expire, and their holders told.
func TestTableClose(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		d := e.mutexDriver(t, "table")
		m := newMutex(t, d, coord.MutexConfig{})
		lock, err := m.Lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		d.Close()
		if <-lock.Done(); !errors.Is(lock.Err(), coord.ErrLost) {
			t.Errorf("Err after Close = %v, want ErrLost", lock.Err())
		}
		if _, err := e.mutexDriver(t, "table").Acquire(t.Context(), "a", time.Hour); !errors.Is(err, coord.ErrHeld) {
			t.Errorf("Acquire by another after Close = %v, want ErrHeld", err)
		}
	})
}

func TestAdvisoryRefusals(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		if !e.postgres() {
			if _, err := c.AdvisoryDriver(coord.DriverConfig{}); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("AdvisoryDriver = %v, want ErrUnsupported", err)
			}
			err := inTx(t, e.db, nil, func(tx *sql.Tx) error { return c.LockTx(t.Context(), tx, "a") })
			if !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("LockTx = %v, want ErrUnsupported", err)
			}
			return
		}
		db := e.open(t)
		db.SetMaxOpenConns(1)
		if _, err := newCoord(t, db, e.dialect, e.config()).AdvisoryDriver(coord.DriverConfig{}); !errors.Is(err, coord.ErrInvalid) {
			t.Errorf("AdvisoryDriver on one connection = %v, want ErrInvalid", err)
		}
		cockroach := copyDialect(t, e.dialect)
		cockroach.files["advisory.sql"].Data = []byte(strings.ReplaceAll(string(cockroach.files["advisory.sql"].Data), "version()", "'CockroachDB CCL v25.2.0'"))
		c = newCoord(t, e.open(t), cockroach, e.config())
		d, err := c.AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Acquire(t.Context(), "a", time.Hour); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "CockroachDB") {
			t.Errorf("Acquire on CockroachDB = %v, want ErrUnsupported that names it", err)
		}
		err = inTx(t, e.db, nil, func(tx *sql.Tx) error { return c.LockTx(t.Context(), tx, "a") })
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("LockTx on CockroachDB = %v, want ErrUnsupported", err)
		}
	})
}

// TestAdvisoryThroughPooler: the driver refuses it by name, whatever the driver
// below sends and however the pooler shares its servers out, and leaves nothing
// locked. LockTx works.
func TestAdvisoryThroughPooler(t *testing.T) {
	for _, e := range engines {
		if !e.pooler {
			continue
		}
		for _, settings := range []string{"", "server_round_robin = 1"} {
			for _, noPrepare := range []bool{true, false} {
				t.Run(fmt.Sprint(e.name, "/", settings, "/NoPrepare=", noPrepare), func(t *testing.T) {
					e := e
					parameter := e.dsn(t)
					parameter = parameter[strings.LastIndex(parameter, "&"):]
					e.dsn = func(t testing.TB) string { return testdb.PgBouncer(t, settings) + parameter }
					refusesPooler(t, newEnv(t, e, nil), noPrepare)
				})
			}
		}
	}
}

func refusesPooler(t *testing.T, e *env, noPrepare bool) {
	for servers := 0; servers <= 3; servers++ {
		var open []*sql.Tx // So many servers are idle afterwards.
		for range servers {
			tx, err := e.db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec("SELECT 1"); err != nil {
				t.Fatal(err)
			}
			open = append(open, tx)
		}
		for _, tx := range open {
			tx.Rollback()
		}
		cfg := e.config()
		cfg.NoPrepare = noPrepare
		d, err := newCoord(t, e.open(t), e.dialect, cfg).AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := d.Acquire(t.Context(), "a", time.Hour); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "PgBouncer") {
				t.Errorf("%d idle servers: Acquire = %v, want ErrUnsupported that names PgBouncer", servers, err)
			}
			e.exec(t, "SELECT 1") // The servers take turns.
		}
	}
	var locks int
	e.scan(t, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", &locks)
	if locks != 0 {
		t.Errorf("%d advisory locks are left, want 0", locks)
	}
	c := e.coord(t)
	err := inTx(t, e.db, nil, func(tx *sql.Tx) error {
		if err := c.LockTx(t.Context(), tx, "a"); err != nil {
			return err
		}
		return inTx(t, e.db, nil, func(tx *sql.Tx) error {
			if err := c.TryLockTx(t.Context(), tx, "a"); !errors.Is(err, coord.ErrHeld) {
				t.Errorf("TryLockTx = %v, want ErrHeld", err)
			}
			return nil
		})
	})
	if err != nil {
		t.Errorf("LockTx = %v", err)
	}
}

// TestAdvisoryForeignSession: a session that is not marked as the driver's locks
// nothing, whoever it is that shares it.
func TestAdvisoryForeignSession(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		conn, err := e.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, step := range []struct {
			section string
			args    []any
			want    sql.NullBool
		}{
			{"exchange", []any{"[[1, true]]", "mine"}, sql.NullBool{}},
			{"mark", []any{"mine"}, sql.NullBool{}},
			{"exchange", []any{"[[1, true]]", "other"}, sql.NullBool{}},
			{"exchange", []any{"[[1, false]]", "other"}, sql.NullBool{}},
			{"exchange", []any{"[[1, true]]", "mine"}, sql.NullBool{Bool: true, Valid: true}},
			{"exchange", []any{"[[1, false]]", "other"}, sql.NullBool{}},
			{"exchange", []any{"[[1, false]]", "mine"}, sql.NullBool{Bool: true, Valid: true}},
		} {
			row := conn.QueryRowContext(t.Context(), sectionText(t, e.dialect, "advisory.sql", step.section), step.args...)
			if step.section == "mark" {
				err = row.Scan(new(string))
			} else {
				var place int64
				var got sql.NullBool
				if err = row.Scan(&place, &got); got != step.want || place != 1 {
					t.Errorf("%s %v = %d, %v, want %v", step.section, step.args, place, got, step.want)
				}
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestAdvisoryStatementFails: after errors of lock or unlock that leave unknown what the
// session holds, it ends, and with it all that it holds.
func TestAdvisoryStatementFails(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		for _, function := range []string{"pg_try_advisory_lock", "pg_advisory_unlock"} {
			d := copyDialect(t, e.dialect)
			text := string(d.files["advisory.sql"].Data)
			// The function has its effect, then the statement fails, and so does the one that would settle it.
			const of, fails = "((value ->> 0)::bigint)", " IS NOT NULL AND 1 / (CASE WHEN (value ->> 0)::bigint = 0 THEN 1 ELSE 0 END) = 1"
			text = strings.Replace(text, "pg_advisory_unlock"+of, "pg_advisory_unlock"+of+fails, 1)
			if function == "pg_try_advisory_lock" {
				text = strings.Replace(text, function+of, function+of+fails, 1)
			}
			d.files["advisory.sql"].Data = []byte(text)
			driver, err := newCoord(t, e.open(t), d, e.config()).AdvisoryDriver(coord.DriverConfig{})
			if err != nil {
				t.Fatal(err)
			}
			lock, err := driver.Acquire(t.Context(), "a", time.Hour)
			if function == "pg_advisory_unlock" {
				if err != nil {
					t.Fatal(err)
				}
				_, err = driver.Release(t.Context(), lock)
			}
			if err == nil || errors.Is(err, coord.ErrHeld) {
				t.Errorf("%s that fails = %v, want the driver's error", function, err)
			}
			rival := newMutex(t, e.mutexDriver(t, "advisory"), coord.MutexConfig{})
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if taken, err := rival.Lock(ctx, "a"); err != nil {
				t.Errorf("Lock by another after a failed %s = %v", function, err)
			} else {
				taken.Unlock(ctx)
			}
		}
	})
}

// TestLateRenewal: one that was dated before the last and arrives after it does not
// move the expiry back.
func TestLateRenewal(t *testing.T) {
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			e := newEnv(t, e, newClock())
			now := e.clock.Now()
			d := e.mutexDriver(t, "table")
			lock, err := d.Acquire(t.Context(), "m", 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			s := e.coord(t).Leases()
			grant(t, s, "a", 10*time.Second)
			l := e.locker(t, coord.EIDConfig{TTL: 10 * time.Second})
			lockIDs(t, l, "tx", "id")
			for _, at := range []time.Duration{5 * time.Second, time.Second} {
				e.clock.set(now.Add(at))
				if ok, err := d.Extend(t.Context(), lock, 10*time.Second); !ok || err != nil {
					t.Fatalf("Extend = %v, %v", ok, err)
				}
				renewed, err := s.Renew(t.Context(), "jobs", []int{3}, "a", 10*time.Second)
				if err != nil || len(renewed) != 1 || !renewed[0].ExpiresAt.Equal(now.Add(15*time.Second)) {
					t.Fatalf("Renew dated %v = %+v, %v, want it to last until 15 s", at, renewed, err)
				}
				lockIDs(t, l, "tx", "id")
			}
			e.clock.set(now.Add(15*time.Second - 1))
			if _, err := e.mutexDriver(t, "table").Acquire(t.Context(), "m", time.Second); !errors.Is(err, coord.ErrHeld) {
				t.Errorf("Acquire before the later renewal's end = %v, want ErrHeld", err)
			}
			assertIDs(t, l, "tx", nil)
			if _, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Second); err != nil {
				t.Fatal(err)
			}
			e.clock.set(now.Add(16 * time.Second))
			if owners, err := s.Owners(t.Context(), "jobs"); len(owners) != 0 || err != nil {
				t.Errorf("Owners after a renewal that shortened the lease = %v, %v, want nobody", owners, err)
			}
		})
	}
}

// TestCloseLetsReleasesThrough that are under way, and ends acquisitions for good.
func TestCloseLetsReleasesThrough(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		c := newCoord(t, e.open(t), e.dialect, e.config())
		d, err := c.TableDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		free, err := d.Acquire(t.Context(), "free", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		d.Release(t.Context(), free)
		held, err := d.Acquire(t.Context(), "held", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec("SELECT FROM coord_mutex FOR UPDATE"); err != nil {
			t.Fatal(err)
		}
		released, acquired := make(chan error, 1), make(chan error, 1)
		go func() {
			ok, err := d.Release(context.Background(), held)
			if err == nil && !ok {
				err = errors.New("not released")
			}
			released <- err
		}()
		go func() { _, err := d.Acquire(context.Background(), "free", time.Hour); acquired <- err }()
		e.blocked(t, "coord_mutex", 1) // The release waits for its row, and the acquisition asks for its own.
		e.asksAgain(t, "coord_mutex", 1)
		closed := make(chan struct{})
		go func() { c.Close(); close(closed) }()
		if err := <-acquired; !errors.Is(err, coord.ErrClosed) {
			t.Errorf("Acquire during Close = %v, want ErrClosed", err)
		}
		tx.Rollback()
		if err := <-released; err != nil {
			t.Errorf("Release during Close = %v", err)
		}
		<-closed
		var left int
		e.scan(t, "SELECT count(*) FROM coord_mutex WHERE expires_at > 'epoch'", &left)
		if left != 0 {
			t.Errorf("%d locks are left, want 0", left)
		}
	})
}

// TestLockTx excludes the session mode, and ends with its transaction.
func TestLockTx(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		d := e.mutexDriver(t, "advisory")
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if err := c.LockTx(t.Context(), tx, "a"); err != nil {
			t.Fatal(err)
		}
		if err := c.TryLockTx(t.Context(), tx, "a"); err != nil {
			t.Errorf("TryLockTx again in the same transaction = %v", err)
		}
		if _, err := d.Acquire(t.Context(), "a", time.Hour); !errors.Is(err, coord.ErrHeld) {
			t.Errorf("Acquire during LockTx = %v, want ErrHeld", err)
		}
		err = inTx(t, e.db, nil, func(tx *sql.Tx) error { return c.TryLockTx(t.Context(), tx, "a") })
		if !errors.Is(err, coord.ErrHeld) {
			t.Errorf("TryLockTx during LockTx = %v, want ErrHeld", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		err = inTx(t, e.db, nil, func(tx *sql.Tx) error { return c.LockTx(ctx, tx, "a") })
		for _, want := range []error{coord.ErrAcquireTimeout, coord.ErrHeld, context.DeadlineExceeded} {
			if !errors.Is(err, want) {
				t.Errorf("LockTx until its deadline = %v, want %v", err, want)
			}
		}
		waited := make(chan error, 1)
		go func() {
			tx, err := e.db.Begin()
			if err == nil {
				defer tx.Rollback()
				err = c.LockTx(context.Background(), tx, "a")
			}
			waited <- err
		}()
		eventually(t, "LockTx waits", func() (waits bool) {
			e.scan(t, "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()", &waits)
			return waits
		})
		tx.Rollback()
		if err := <-waited; err != nil {
			t.Errorf("LockTx that waited = %v", err)
		}
		eventually(t, "the waiter's transaction ends", func() bool {
			lock, err := d.Acquire(t.Context(), "a", time.Hour)
			if err == nil {
				defer d.Release(t.Context(), lock)
				err = inTx(t, e.db, nil, func(tx *sql.Tx) error { return c.TryLockTx(t.Context(), tx, "a") })
				if !errors.Is(err, coord.ErrHeld) {
					t.Errorf("TryLockTx while the session holds it = %v, want ErrHeld", err)
				}
				return true
			}
			return false
		})
		var keys int
		key := coord.AdvisoryKey("b")
		lock, err := d.Acquire(t.Context(), "b", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		e.scan(t, fmt.Sprintf("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND (classid::bigint << 32 | objid::bigint) = %d", key), &keys)
		if keys != 1 {
			t.Errorf("AdvisoryKey finds %d rows in pg_locks, want 1", keys)
		}
		d.Release(t.Context(), lock)
	})
}

// TestLockEnds: which errors a wait ends with, and that nothing stays locked.
func TestLockEnds(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) {
		d := e.mutexDriver(t, mode)
		m := newMutex(t, d, coord.MutexConfig{})
		other := newMutex(t, e.mutexDriver(t, mode), coord.MutexConfig{})
		held, err := other.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		for _, local := range []bool{false, true} {
			who := m
			if local {
				who = other // Behind a caller of its own process.
			}
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			_, err = who.Lock(ctx, "m")
			cancel()
			for _, want := range []error{coord.ErrAcquireTimeout, coord.ErrHeld, context.DeadlineExceeded} {
				if !errors.Is(err, want) {
					t.Errorf("local %v: Lock until its deadline = %v, want %v", local, err, want)
				}
			}
			cause := errors.New("enough")
			ctx, end := context.WithCancelCause(t.Context())
			time.AfterFunc(500*time.Millisecond, func() { end(cause) })
			_, err = who.Lock(ctx, "m")
			if !errors.Is(err, coord.ErrHeld) || !errors.Is(err, cause) || !errors.Is(err, context.Canceled) || errors.Is(err, coord.ErrAcquireTimeout) {
				t.Errorf("local %v: Lock that was cancelled = %v, want ErrHeld and the cause alone", local, err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), -1)
		defer cancel()
		if _, err := m.Lock(ctx, "free"); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, coord.ErrHeld) || errors.Is(err, coord.ErrAcquireTimeout) {
			t.Errorf("Lock of a free lock after its deadline = %v, want the cause alone", err)
		}
		if err := held.Unlock(ctx); err != nil { // Its context has ended.
			t.Errorf("Unlock = %v", err)
		}
		if err := held.Unlock(t.Context()); err != nil || held.Err() != nil {
			t.Errorf("Unlock again = %v, Err = %v, want nil", err, held.Err())
		}
	})
}

// TestLockSweep: whenever the end of the context comes around the grant, either
// the caller has the lock or nobody has.
func TestLockSweep(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) {
		moments := 500
		if e.pooler {
			moments = 100
		}
		d, rival := e.mutexDriver(t, mode), e.mutexDriver(t, mode)
		m := newMutex(t, d, coord.MutexConfig{TTL: time.Hour})
		warm, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		warm.Unlock(t.Context())
		granted := 0
		for i := range moments {
			ctx, cancel := context.WithCancel(t.Context())
			stop := time.AfterFunc(time.Duration(i)*2*time.Microsecond, cancel)
			lock, err := m.Lock(ctx, "m")
			if err == nil {
				granted++
				err = lock.Unlock(ctx)
			} else if errors.Is(err, context.Canceled) {
				err = nil
			}
			stop.Stop()
			cancel()
			if err != nil {
				t.Fatalf("moment %d: %v", i, err)
			}
			eventually(t, "nothing stays locked", func() bool {
				lock, err := rival.Acquire(t.Context(), "m", time.Hour)
				if err != nil {
					return false
				}
				rival.Release(t.Context(), lock)
				return true
			})
		}
		t.Logf("%d of %d were granted", granted, moments)
	})
}

// TestManyWaiters: a thousand goroutines of one process ask as one.
func TestManyWaiters(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) {
		other := newMutex(t, e.mutexDriver(t, mode), coord.MutexConfig{})
		held, err := other.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		counted := &countingDriver{MutexDriver: e.mutexDriver(t, mode)}
		m := newMutex(t, counted, coord.MutexConfig{})
		const waiters = 1000
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() {
				if _, err := m.Lock(ctx, "m"); !errors.Is(err, coord.ErrHeld) {
					t.Errorf("Lock = %v, want ErrHeld", err)
				}
			})
		}
		start := time.Now()
		eventually(t, "it has asked a while", func() bool { return counted.calls.Load() >= 25 })
		took := time.Since(start)
		cancel()
		wg.Wait()
		if most := counted.most.Load(); most != 1 {
			t.Errorf("%d statements were in flight at once, want 1", most)
		}
		// Four early tries, then at most 20 a second.
		if calls := counted.calls.Load(); float64(calls) > 5+20*took.Seconds() {
			t.Errorf("%d statements in %v, want at most 20 a second", calls, took)
		}
		held.Unlock(t.Context())
	})
}

// countingDriver counts acquisitions.
type countingDriver struct {
	coord.MutexDriver
	calls, now, most atomic.Int64
}

func (d *countingDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (coord.DriverLock, error) {
	d.calls.Add(1)
	now := d.now.Add(1)
	defer d.now.Add(-1)
	for most := d.most.Load(); now > most && !d.most.CompareAndSwap(most, now); most = d.most.Load() {
	}
	return d.MutexDriver.Acquire(ctx, name, ttl)
}

// TestFirstComeFirstServed among the callers of one Mutex.
func TestFirstComeFirstServed(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) {
		m := newMutex(t, e.mutexDriver(t, mode), coord.MutexConfig{})
		lock, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		order := make(chan int, 10)
		var wg sync.WaitGroup
		for i := range 10 {
			ready := make(chan struct{})
			wg.Go(func() {
				close(ready)
				lock, err := m.Lock(t.Context(), "m")
				if err != nil {
					t.Error(err)
					return
				}
				order <- i
				lock.Unlock(t.Context())
			})
			<-ready
			time.Sleep(2 * time.Millisecond) // Until it is in the line: nothing else shows it.
		}
		lock.Unlock(t.Context())
		wg.Wait()
		for i := range 10 {
			if got := <-order; got != i {
				t.Fatalf("the %d. lock went to caller %d", i, got)
			}
		}
	})
}

func TestMutexRefusedWritesNothing(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		d, rival := e.mutexDriver(t, "table"), e.mutexDriver(t, "table")
		if _, err := d.Acquire(t.Context(), "m", time.Hour); err != nil {
			t.Fatal(err)
		}
		refuse := func(n int) {
			for range n {
				if _, err := rival.Acquire(t.Context(), "m", time.Hour); !errors.Is(err, coord.ErrHeld) {
					t.Fatalf("Acquire = %v, want ErrHeld", err)
				}
			}
		}
		refuse(5)
		if wal := e.wal(t, func() { refuse(200) }); wal != 0 {
			t.Errorf("200 refusals wrote %d bytes of WAL, want 0", wal)
		}
	})
}

// TestMutexStaysHOT: acquisitions, renewals and releases.
func TestMutexStaysHOT(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		db := e.open(t)
		c := newCoord(t, db, e.dialect, e.config())
		d, err := c.TableDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		const rounds = 300
		for range rounds {
			lock, err := d.Acquire(t.Context(), "m", time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			d.Extend(t.Context(), lock, time.Hour)
			d.Release(t.Context(), lock)
		}
		c.Close()
		db.Close()
		updates, hot := e.updates(t, "coord_mutex", 3*rounds)
		if hot*100 < updates*99 {
			t.Errorf("%d of %d updates were HOT, want 99 %%", hot, updates)
		}
	})
}

// TestMutexGuard: a takeover asks again until an open guard has ended, a renewal and a
// release do not wait for it.
func TestMutexGuard(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		m := newMutex(t, e.mutexDriver(t, "table"), coord.MutexConfig{})
		d, rival := e.mutexDriver(t, "table"), e.mutexDriver(t, "table")
		lock, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if err := lock.Guard(t.Context(), tx); err != nil {
			t.Fatal(err)
		}
		same := coord.DriverLock{Name: "m", Fence: lock.Fence()}
		if ok, err := d.Extend(t.Context(), same, time.Hour); !ok || err != nil {
			t.Errorf("Extend during a guard = %v, %v, want true", ok, err)
		}
		if err := lock.Unlock(t.Context()); err != nil {
			t.Errorf("Unlock during a guard = %v", err)
		}
		taken := make(chan error, 1)
		go func() {
			_, err := rival.Acquire(context.Background(), "m", time.Hour)
			taken <- err
		}()
		e.asksAgain(t, "coord_mutex", 0)
		select {
		case err := <-taken:
			t.Errorf("Acquire during the guard = %v", err)
		default:
		}
		tx.Commit()
		if err := <-taken; err != nil {
			t.Errorf("Acquire after the guard = %v", err)
		}
		err = inTx(t, e.db, nil, func(tx *sql.Tx) error { return lock.Guard(t.Context(), tx) })
		if !errors.Is(err, coord.ErrLost) {
			t.Errorf("Guard after the takeover = %v, want ErrLost", err)
		}
		advisory, err := newMutex(t, e.mutexDriver(t, "advisory"), coord.MutexConfig{}).Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		err = inTx(t, e.db, nil, func(tx *sql.Tx) error { return advisory.Guard(t.Context(), tx) })
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("Guard in advisory mode = %v, want ErrUnsupported", err)
		}
		advisory.Unlock(t.Context())
	})
}

// TestMutexTables: tables, schemas and prefixes of their own.
func TestMutexTables(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		configs := []coord.DriverConfig{{}, {Prefix: "p"}, {Table: "locks"}, {Table: "locks", Prefix: "p"}}
		if e.postgres() {
			e.exec(t, `CREATE SCHEMA "Other"`)
			configs = append(configs, coord.DriverConfig{Table: "Other.locks"}, coord.DriverConfig{Table: "Other.coord_mutex"})
		}
		for _, cfg := range configs {
			d, err := c.TableDriver(cfg)
			if err != nil {
				t.Fatal(err)
			}
			lock, err := d.Acquire(t.Context(), "m", time.Hour)
			if err != nil {
				t.Fatalf("%+v: Acquire = %v", cfg, err)
			}
			same, err := c.TableDriver(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := same.Acquire(t.Context(), "m", time.Hour); !errors.Is(err, coord.ErrHeld) {
				t.Errorf("%+v: Acquire by another driver = %v, want ErrHeld", cfg, err)
			}
			if ok, err := same.Release(t.Context(), lock); !ok || err != nil {
				t.Errorf("%+v: Release = %v, %v", cfg, ok, err)
			}
		}
		if n, err := c.Purge(t.Context(), time.Hour); n != int64(len(configs)) || err != nil {
			t.Errorf("Purge = %d, %v, want the released rows of all %d", n, err, len(configs))
		}
	})
}

func TestDo(t *testing.T) {
	eachMutex(t, func(t *testing.T, e *env, mode string) {
		m := newMutex(t, e.mutexDriver(t, mode), coord.MutexConfig{})
		failure := errors.New("no luck")
		err := m.Do(t.Context(), "m", func(ctx context.Context, lock *coord.Lock) error { return failure })
		if !errors.Is(err, failure) {
			t.Errorf("Do = %v, want what fn returned", err)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Error("Do swallowed a panic")
				}
			}()
			m.Do(t.Context(), "m", func(context.Context, *coord.Lock) error { panic("oops") })
		}()
		lock, err := m.TryLock(t.Context(), "m")
		if err != nil {
			t.Fatalf("TryLock after a panic = %v", err)
		}
		lock.Unlock(t.Context())
		if mode != "table" {
			return
		}
		quick := newMutex(t, e.mutexDriver(t, mode), coord.MutexConfig{TTL: 300 * time.Millisecond})
		err = quick.Do(t.Context(), "m", func(ctx context.Context, lock *coord.Lock) error {
			e.exec(t, "DELETE FROM coord_mutex")
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), coord.ErrLost) {
				t.Errorf("the cause is %v, want ErrLost", context.Cause(ctx))
			}
			return nil
		})
		if !errors.Is(err, coord.ErrLost) {
			t.Errorf("Do whose lock was lost = %v, want ErrLost", err)
		}
	})
}
