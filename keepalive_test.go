package coord

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
)

// world is a database in memory that knows leases, members, table mutexes and (through
// eidDB) sets of ids, and the looks for tables. Every table is there.
type world struct {
	fakeDriver
	c    *Coord
	db   *sql.DB
	eids *eidDB
	logs bytes.Buffer

	mu      sync.Mutex
	before  func(kind string, s statement) error
	leases  map[string]*fakeLease // group/partition
	members map[string]fakeMember // service/node
	locks   map[string]*fakeLease // name
	fence   int64
	kinds   []string
}

func (w *world) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.logs.Write(p)
}

func newWorld(t *testing.T, cfg Config) *world {
	t.Helper()
	w := &world{leases: map[string]*fakeLease{}, members: map[string]fakeMember{}, locks: map[string]*fakeLease{}}
	w.fakeDriver.answer = w.reply
	w.db = sql.OpenDB(&w.fakeDriver)
	cfg.NoPrepare = true
	cfg.Owner = "a"
	cfg.Logger = slog.New(slog.NewTextHandler(w, nil))
	c, err := New(w.db, Postgres, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range c.tables {
		table.ready.Store(true)
	}
	w.c = c
	w.eids = &eidDB{fakeDriver: &w.fakeDriver, sql: &c.eids, rows: map[string]eidRow{}}
	t.Cleanup(func() { c.Close(); w.db.Close() })
	return w
}

func (w *world) set(before func(kind string, s statement) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before = before
}

func (w *world) kind(text string) string {
	m := TableDriver{c: w.c}
	m.load(w.c.names)
	c := w.c
	names := map[string]string{
		c.leases.acquire: "lease acquire", c.leases.renew: "lease renew", c.leases.release: "lease release", c.leases.owners: "lease owners",
		c.leases.undo: "lease undo", c.leases.holder: "lease holder", c.members.heartbeat: "heartbeat", c.members.leave: "leave", c.members.list: "list",
		m.acquire: "mutex acquire", m.renew: "mutex renew", m.release: "mutex release", m.extend: "mutex extend", m.undo: "mutex undo",
		c.eids.acquire: "eid acquire", c.eids.renew: "eid renew", c.eids.release: "eid release", c.eids.undo: "eid undo", c.eids.check: "eid check", c.eids.holder: "eid holder",
		c.format.where: "where", c.format.formats: "formats", c.format.terminate: "terminate",
	}
	return names[text]
}

func (w *world) reply(s statement) (driver.Rows, error) {
	kind := w.kind(s.text)
	w.mu.Lock()
	before := w.before
	w.kinds = append(w.kinds, kind)
	w.mu.Unlock()
	if before != nil {
		if err := before(kind, s); err != nil {
			return nil, err
		}
	}
	if strings.HasPrefix(kind, "eid") {
		return w.eids.run(s), nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	str := func(i int) string { return s.args[i].Value.(string) }
	num := func(i int) int64 { return s.args[i].Value.(int64) }
	key := func() string { return fmt.Sprint(str(0), "/", num(1)) }
	ttl := func(us int64) time.Time { return time.Now().Add(time.Duration(us) * time.Microsecond) }
	switch kind {
	case "lease acquire":
		l := w.leases[key()]
		if l == nil {
			l = &fakeLease{}
			w.leases[key()] = l
		}
		if l.owner != str(2) && l.expires.After(time.Now()) {
			return &fewRows{{false, l.owner, l.epoch, l.expires.UnixMicro()}}, nil
		}
		*l = fakeLease{str(2), l.epoch + 1, ttl(num(3))}
		return &fewRows{{true, l.owner, l.epoch, l.expires.UnixMicro()}}, nil
	case "lease renew":
		var ps []int
		json.Unmarshal([]byte(str(1)), &ps)
		rows := &fewRows{}
		for _, p := range ps {
			if l := w.leases[fmt.Sprint(str(0), "/", p)]; l != nil && l.owner == str(2) && l.expires.After(time.Now()) {
				l.expires = ttl(num(3))
				*rows = append(*rows, []driver.Value{int64(p), l.epoch, l.expires.UnixMicro(), true})
			}
		}
		return rows, nil
	case "lease release":
		if l := w.leases[key()]; l != nil && l.owner == str(2) {
			l.expires = time.Time{}
		}
	case "lease owners":
		rows := &fewRows{}
		for p := range 2000 {
			if l := w.leases[fmt.Sprint(str(0), "/", p)]; l != nil && l.expires.After(time.Now()) {
				*rows = append(*rows, []driver.Value{int64(p), l.owner, l.epoch, l.expires.UnixMicro()})
			}
		}
		return rows, nil
	case "heartbeat":
		m := fakeMember{str(3), ttl(num(4))}
		w.members[str(0)+"/"+str(1)] = m
		return &fewRows{{m.expires.UnixMicro()}}, nil
	case "leave":
		delete(w.members, str(0)+"/"+str(1))
	case "list":
		rows := &fewRows{}
		for _, node := range []string{"a", "b", "c"} {
			if m, ok := w.members[str(0)+"/"+node]; ok && m.expires.After(time.Now()) {
				*rows = append(*rows, []driver.Value{node, "", m.groups, m.expires.UnixMicro()})
			}
		}
		return rows, nil
	case "mutex acquire":
		l := w.locks[str(0)]
		if l != nil && l.expires.After(time.Now()) {
			return &fewRows{{false, l.owner, l.epoch, l.expires.UnixMicro()}}, nil
		}
		w.fence++
		l = &fakeLease{str(1), w.fence, ttl(num(2))}
		w.locks[str(0)] = l
		return &fewRows{{true, l.owner, l.epoch, l.expires.UnixMicro()}}, nil
	case "mutex renew":
		var list [][3]json.RawMessage
		json.Unmarshal([]byte(str(0)), &list)
		rows := &fewRows{}
		for _, one := range list {
			var name string
			var fence, us int64
			json.Unmarshal(one[0], &name)
			json.Unmarshal(one[1], &fence)
			json.Unmarshal(one[2], &us)
			if l := w.locks[name]; l != nil && l.epoch == fence && !l.expires.IsZero() {
				l.expires = ttl(us)
				*rows = append(*rows, []driver.Value{name, fence, true})
			}
		}
		return rows, nil
	case "mutex extend":
		if l := w.locks[str(0)]; l != nil && l.epoch == num(1) && !l.expires.IsZero() {
			l.expires = ttl(num(2))
			return changed{rows: 1}, nil
		}
		return changed{}, nil
	case "mutex release":
		if l := w.locks[str(0)]; l != nil && l.epoch == num(1) && !l.expires.IsZero() {
			l.expires = time.Time{}
			return changed{rows: 1}, nil
		}
		return changed{}, nil
	case "where":
		return &fewRows{{"public", "public"}}, nil
	case "formats":
		rows := &fewRows{{w.c.format.name, int64(knownFormat)}}
		for _, t := range w.c.known() {
			*rows = append(*rows, []driver.Value{t.record, int64(knownFormat)})
		}
		return rows, nil
	}
	return noRows{}, nil
}

func (w *world) mutex(t *testing.T, cfg MutexConfig) *Mutex {
	t.Helper()
	d, err := w.c.TableDriver(DriverConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewMutex(d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func mustMutex(t *testing.T, m *Mutex, name string) *Lock {
	t.Helper()
	l, err := m.Lock(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func slowly(d time.Duration) func(string, statement) error {
	return func(string, statement) error { time.Sleep(d); return nil }
}

// TestSlowStatementsDefaults: all at the defaults (TTL of a run 15 s, of a mutex and a set
// 30 s; Timeout 5 s), each statement takes 3 s, 60 % of Timeout, and all succeed: nothing may
// be lost.
func TestSlowStatementsDefaults(t *testing.T) {
	for _, runs := range []int{1} { // At 3 s a statement, more do not fit one connection.
		t.Run(fmt.Sprint(runs, " runs"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, Config{})
				l := mustMutex(t, w.mutex(t, MutexConfig{}), "m")
				ids := newLocker(t, w.c, EIDConfig{})
				mustLock(t, ids, "x", "1", "2")
				ctx, cancel := context.WithCancel(t.Context())
				var all sync.WaitGroup
				var mu sync.Mutex
				lost := 0
				for i := range runs {
					all.Go(func() {
						w.c.RunLeader(ctx, fmt.Sprint("lead", i), 0, func(under context.Context, _ Lease) error {
							<-under.Done()
							if errors.Is(context.Cause(under), ErrLost) {
								mu.Lock()
								lost++
								mu.Unlock()
							}
							return nil
						})
					})
				}
				time.Sleep(time.Second)
				w.set(slowly(3 * time.Second))
				time.Sleep(3 * time.Minute)
				if l.Err() != nil {
					t.Error("the mutex was lost")
				}
				if isLost(ids, "x") {
					t.Error("the set was lost")
				}
				mu.Lock()
				if lost > 0 {
					t.Errorf("the lead was lost %d times", lost)
				}
				mu.Unlock()
				for i := range runs {
					w.mu.Lock()
					m := w.members[fmt.Sprint("lead", i, "/a")]
					w.mu.Unlock()
					if !m.expires.After(time.Now()) {
						t.Errorf("membership %d has expired", i)
					}
				}
				w.set(nil)
				cancel()
				all.Wait()
			})
		})
	}
}

// TestMigrateFails: while the application has all of the pool, a Migrate that fails (it
// needs the pool) must not take renewals, whose connection is free, off it.
func TestMigrateFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		w.db.SetMaxOpenConns(3)
		ctx, cancel := context.WithCancel(t.Context())
		lost, done := make(chan struct{}, 10), make(chan struct{})
		go func() {
			defer close(done)
			w.c.RunLeader(ctx, "lead", 0, func(under context.Context, _ Lease) error {
				<-under.Done()
				if errors.Is(context.Cause(under), ErrLost) {
					lost <- struct{}{}
				}
				return nil
			})
		}()
		time.Sleep(15 * time.Second)
		for range 2 {
			conn, err := w.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		time.Sleep(time.Minute)
		if len(lost) > 0 {
			t.Fatal("lost before Migrate")
		}
		if err := w.c.Migrate(t.Context()); err == nil {
			t.Fatal("Migrate had a connection")
		}
		time.Sleep(time.Minute)
		if len(lost) > 0 {
			t.Error("the lead was lost after a failed Migrate, though the connection for renewals is free and healthy")
		}
		cancel()
		<-done
	})
}

// TestFirstRenewalBehindTheApplication: renewals have a connection of their own. The
// application takes the whole pool a moment after the lock was granted.
func TestFirstRenewalBehindTheApplication(t *testing.T) {
	for _, kind := range []string{"mutex", "set"} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, Config{})
				w.db.SetMaxOpenConns(3)
				var lost <-chan struct{}
				if kind == "mutex" {
					lost = mustMutex(t, w.mutex(t, MutexConfig{}), "m").Done()
				} else {
					ids := newLocker(t, w.c, EIDConfig{})
					mustLock(t, ids, "x", "1")
					lost = ids.Lost("x")
				}
				time.Sleep(time.Millisecond) // The connection is borrowed beside the acquisition.
				for range 3 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					if conn, err := w.db.Conn(ctx); err == nil {
						defer conn.Close()
					}
				}
				time.Sleep(time.Minute)
				select {
				case <-lost:
					t.Error("lost: the first renewal waits behind the application for a connection")
				default:
				}
			})
		})
	}
}

// TestLateReplyCounts: a renewal whose reply comes after a third of the TTL, but long before
// the deadline, has come through.
func TestLateReplyCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		l := mustMutex(t, w.mutex(t, MutexConfig{TTL: 8 * time.Second}), "m") // Its statements are waited for 2.67 s.
		w.set(func(kind string, _ statement) error {
			if kind == "mutex renew" {
				time.Sleep(3 * time.Second) // 60 % of Timeout.
			}
			return nil
		})
		time.Sleep(time.Minute)
		if l.Err() != nil {
			t.Error("lost, though each renewal was done, and answered after 3 s with 4 s to go")
		}
	})
}

// TestOthersPatience: the pinned connection goes dead under a heartbeat (TTL 6 s). A lock of
// 6 s must survive it: what it waits for is a third of the TTL, then there is a new connection.
func TestOthersPatience(t *testing.T) {
	for _, op := range []string{"Heartbeat", "Renew"} {
		t.Run(op, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, Config{})
				const ttl = 6 * time.Second
				l := mustMutex(t, w.mutex(t, MutexConfig{TTL: ttl}), "m")
				if _, err := w.c.Leases().Acquire(t.Context(), "g", 1, "a", ttl); err != nil {
					t.Fatal(err)
				}
				call := func() error {
					_, err := w.c.Members().Heartbeat(t.Context(), "s", "n", "", ttl, nil)
					return err
				}
				if op == "Renew" {
					call = func() error {
						_, err := w.c.Leases().Renew(t.Context(), "g", []int{1}, "a", ttl)
						return err
					}
				}
				if err := call(); err != nil {
					t.Fatal(err)
				}
				dead := w.statements()[len(w.statements())-1].conn
				stuck := make(chan struct{})
				w.set(func(_ string, s statement) error {
					if s.conn == dead {
						<-stuck
					}
					return nil
				})
				time.Sleep(time.Second)
				began := time.Now()
				_ = call()
				if took := time.Since(began); took > ttl/3 {
					t.Errorf("%s with a TTL of %v was waited for %v on a dead connection, want a third", op, ttl, took)
				}
				time.Sleep(10 * time.Second)
				if l.Err() != nil {
					t.Error("the lock was lost by one dead connection")
				}
				close(stuck)
			})
		})
	}
}

// TestHungDial: the pinned connection breaks and one dial hangs; the next works.
func TestHungDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		l := mustMutex(t, w.mutex(t, MutexConfig{TTL: 6 * time.Second}), "m")
		time.Sleep(3 * time.Second)
		stuck := make(chan struct{})
		var hung atomic.Bool
		w.open = func() {
			if hung.CompareAndSwap(false, true) {
				<-stuck
			}
		}
		var broken sync.Once
		w.set(func(kind string, _ statement) (err error) {
			if kind == "mutex renew" {
				broken.Do(func() { err = driver.ErrBadConn })
			}
			return err
		})
		w.db.SetMaxIdleConns(0)
		time.Sleep(20 * time.Second)
		if l.Err() != nil {
			t.Error("the lock of 6 s was lost by one dial that hung: a third of the TTL is 2 s")
		}
		close(stuck)
	})
}

// TestBoundCoversAll: an operation on a session that waits for its turn and then is stuck
// takes a Timeout in all.
func TestBoundCoversAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		stuck := make(chan struct{})
		w.set(func(string, statement) error { <-stuck; return nil })
		beat := func() time.Duration {
			began := time.Now()
			w.c.Members().Heartbeat(t.Context(), "s", "n", "", time.Minute, nil)
			return time.Since(began)
		}
		go beat()
		time.Sleep(time.Second)
		if took := beat(); took > 5*time.Second {
			t.Errorf("Heartbeat took %v with a Timeout of 5 s", took)
		}
		close(stuck)
	})
}

// TestAdvisoryUnlockIsBounded: Unlock takes at most Timeout.
func TestAdvisoryUnlockIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, _ := newAdvisory(t, s, Config{})
		m, _ := NewMutex(d, MutexConfig{Renew: 14 * time.Second})
		l := mustMutex(t, m, "a")
		mustMutex(t, m, "b")
		s.setLatency(4900 * time.Millisecond) // Slow, but below Timeout.
		go d.Acquire(t.Context(), "c", time.Hour)
		time.Sleep(10 * time.Millisecond)
		began := time.Now()
		s.setLatency(time.Hour) // And then nothing answers any more.
		err := l.Unlock(t.Context())
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("Unlock took %v with a Timeout of 5 s: %v", took, err)
		}
		s.setLatency(0)
		time.Sleep(2 * time.Hour)
	})
}

// TestRetriesAreBounded: the server cancels each statement after 4 s (statement_timeout).
func TestRetriesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		w.set(func(string, statement) error { time.Sleep(4 * time.Second); return &pq.Error{Code: "57014"} })
		began := time.Now()
		_, err := w.c.Members().Heartbeat(t.Context(), "s", "n", "", time.Minute, nil)
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("Heartbeat took %v with a Timeout of 5 s: %v", took, err)
		}
	})
}

// TestCloseDuringFirstUseInTx: Close takes a few Timeouts although a statement in a caller's
// transaction is stuck.
func TestCloseDuringFirstUseInTx(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		stuck := make(chan struct{})
		w.set(func(string, statement) error { <-stuck; return nil })
		tx, _ := w.db.Conn(t.Context()) // Stands for a transaction: its type is not looked at by WithTx's statements.
		go w.c.Reservations().WithTx(xTx{tx}).Find(t.Context(), ReservationScope{Context: "c", Aggregate: "a", Namespace: "n"}, "k")
		synctest.Wait()
		closed := make(chan struct{})
		go func() { w.c.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(time.Minute):
			t.Error("Close hangs for a minute and more: a look through the caller's transaction is stuck in the driver")
		}
		close(stuck)
		<-closed
	})
}

type xTx struct{ conn *sql.Conn }

func (x xTx) ExecContext(ctx context.Context, q string, args ...any) (sql.Result, error) {
	return x.conn.ExecContext(ctx, q, args...)
}
func (x xTx) QueryContext(ctx context.Context, q string, args ...any) (*sql.Rows, error) {
	return x.conn.QueryContext(ctx, q, args...)
}
func (x xTx) QueryRowContext(ctx context.Context, q string, args ...any) *sql.Row {
	return x.conn.QueryRowContext(ctx, q, args...)
}

// TestRunEndsDuringDisclaim: a restarted node finds 600 leases of its former self, of which
// it may keep half. Its run ends while it gives the others back, at 20 ms a round trip.
func TestRunEndsDuringDisclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		w.members["s/b"] = fakeMember{`["g"]`, time.Now().Add(time.Hour)}
		for p := range 800 {
			w.leases[fmt.Sprint("g/", p)] = &fakeLease{"a", 1, time.Now().Add(time.Hour)}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- w.c.RunPartitions(ctx, PartitionConfig{Service: "s", Group: "g", Partitions: 800}, func(ctx context.Context, _ Lease) error {
				<-ctx.Done()
				return nil
			})
		}()
		var began time.Time
		w.set(func(kind string, _ statement) error {
			if kind == "lease release" {
				if began.IsZero() {
					began = time.Now()
					cancel()
				}
				time.Sleep(20 * time.Millisecond)
			}
			return nil
		})
		err := <-done
		w.mu.Lock()
		defer w.mu.Unlock()
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("RunPartitions ended %v after its fns: %v", took, err)
		}
		if _, stays := w.members["s/a"]; stays {
			t.Error("the member has not left")
		}
	})
}

// TestReleaseLocksPanics: a panic of the driver reaches the caller of ReleaseLocks.
func TestReleaseLocksPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		l := newLocker(t, w.c, EIDConfig{})
		mustLock(t, l, "x", "1")
		w.set(func(kind string, _ statement) error {
			if kind == "eid release" {
				panic("boom")
			}
			return nil
		})
		defer func() {
			if recover() == nil {
				t.Error("the driver's panic did not reach the caller of ReleaseLocks")
			}
			w.set(nil)
		}()
		l.ReleaseLocks(t.Context(), "x")
	})
}

// TestNothingAfterAdvisoryClose: once Close of a Coord has returned, nothing is sent and
// nothing is borrowed.
func TestNothingAfterClose(t *testing.T) {
	for _, whole := range []bool{false, true} {
		t.Run(fmt.Sprint("coord=", whole), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &advisoryServer{}
				d, _ := newAdvisory(t, s, Config{})
				lock := mustAcquire(t, d, "a")
				_ = d.session.turn.take(context.Background())
				go d.Release(t.Context(), lock)
				time.Sleep(6 * time.Second) // It has timed out, and is repeated in the background.
				s.setFault(func(st statement) fault {
					if d.asksFor(st, false, "a") {
						return fault{err: &pq.Error{Code: "57P01"}, wait: time.Second}
					}
					return fault{wait: 2 * time.Second}
				})
				d.session.turn.give()
				time.Sleep(500 * time.Millisecond)
				if whole {
					d.c.Close()
				} else {
					d.Close()
				}
				closed := time.Now()
				if n := d.c.db.Stats().InUse; n > 0 {
					t.Errorf("%d connections are borrowed after Close", n)
				}
				time.Sleep(time.Minute)
				for _, st := range s.statements() {
					if st.at.After(closed) {
						t.Errorf("%q was sent after Close", st.text)
					}
				}
			})
		})
	}
}

// wrappedTable is a driver of the application's that embeds ours, to count.
type wrappedTable struct{ *TableDriver }

// TestWrappedDriverUsesThePool: renewals never wait behind the application.
func TestWrappedDriverUsesThePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		w.db.SetMaxOpenConns(3)
		if _, err := w.c.Members().Heartbeat(t.Context(), "s", "a", "", time.Minute, nil); err != nil { // Pins the connection.
			t.Fatal(err)
		}
		d, err := w.c.TableDriver(DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		m, err := NewMutex(wrappedTable{d}, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		l := mustMutex(t, m, "m")
		for range 2 {
			conn, err := w.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		time.Sleep(time.Minute)
		if l.Err() != nil {
			t.Error("lost: Extend waits behind the application, while the connection for renewals is idle")
		}
	})
}

// TestTwoMutexesOnADriver: the session ends, and a caller of another Mutex on the driver
// acquires the name at once. It must not be told of the loss of the former lock.
func TestTwoMutexesOnADriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, _ := newAdvisory(t, s, Config{})
		first, _ := NewMutex(d, MutexConfig{})
		d.OnLost(func([]string) { time.Sleep(time.Millisecond) }) // Stands for work, such as 10,000 names.
		second, _ := NewMutex(d, MutexConfig{})
		mustMutex(t, first, "a")
		locked := make(chan *Lock, 1)
		go func() { l, _ := second.Lock(t.Context(), "a"); locked <- l }()
		time.Sleep(time.Second)
		s.end(1)
		l := <-locked
		if l == nil || l.Err() != nil {
			t.Errorf("the new lock is %v, though its session is alive and the server has it locked by connection %d", l.Err(), s.holder("a"))
		}
	})
}

// TestRenewalCountsFromTheSend: what a renewal has waited for its turn on the connection
// takes nothing from the hold.
func TestRenewalCountsFromTheSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		const ttl = 15 * time.Second
		l := mustMutex(t, w.mutex(t, MutexConfig{TTL: ttl}), "m")
		time.Sleep(4400 * time.Millisecond) // Just before its renewal is due.
		w.set(slowly(3 * time.Second))      // 60 % of Timeout.
		for range 2 {
			go w.c.Members().Heartbeat(t.Context(), "s", "n", "", time.Minute, nil)
			synctest.Wait()
		}
		time.Sleep(9300 * time.Millisecond) // Until it was answered, and the next is in flight.
		var sent time.Time
		for _, st := range w.statements() {
			if w.kind(st.text) == "mutex renew" && sent.IsZero() {
				sent = st.at
			}
		}
		if ends, want := l.keeper.ends(), sent.Add(ttl-ttl/10); ends.Before(want.Add(-time.Second)) {
			t.Errorf("the hold ends at %v, %v before the send + TTL - margin: the time that the renewal had waited for its turn", ends, want.Sub(ends))
		}
	})
}

// preparedDriver is a driver that prepares statements; to close one is a round trip.
type preparedDriver struct {
	*fakeDriver
	close func()
}

type preparedDriverConn struct {
	*fakeConn
	d *preparedDriver
}

type xStmt struct {
	c    preparedDriverConn
	text string
}

func (d *preparedDriver) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := d.fakeDriver.Connect(ctx)
	return preparedDriverConn{c.(*fakeConn), d}, err
}
func (c preparedDriverConn) Prepare(text string) (driver.Stmt, error) { return xStmt{c, text}, nil }
func (s xStmt) Close() error {
	if f := s.c.d.close; f != nil {
		f()
	}
	return nil
}
func (s xStmt) NumInput() int                              { return -1 }
func (s xStmt) Exec([]driver.Value) (driver.Result, error) { return nil, errors.New("no") }
func (s xStmt) Query([]driver.Value) (driver.Rows, error)  { return nil, errors.New("no") }
func (s xStmt) QueryContext(ctx context.Context, a []driver.NamedValue) (driver.Rows, error) {
	return s.c.QueryContext(ctx, s.text, a)
}
func (s xStmt) ExecContext(ctx context.Context, a []driver.NamedValue) (driver.Result, error) {
	return s.c.ExecContext(ctx, s.text, a)
}

// TestGiveBackHangs: when the connection for renewals has to go back to the pool (an advisory
// driver needs the other), its prepared statements are closed. The network fails just then.
func TestGiveBackHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Config{})
		d := &preparedDriver{fakeDriver: &fakeDriver{}}
		d.answer = w.reply
		db := sql.OpenDB(d)
		db.SetMaxOpenConns(2)
		c, err := New(db, Postgres, Config{Owner: "a"})
		if err != nil {
			t.Fatal(err)
		}
		for _, table := range c.tables {
			table.ready.Store(true)
		}
		beat := func() error {
			_, err := c.Members().Heartbeat(t.Context(), "s", "n", "", time.Minute, nil)
			return err
		}
		if err := beat(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.AdvisoryDriver(DriverConfig{}); err != nil {
			t.Fatal(err)
		}
		stuck := make(chan struct{})
		d.close = func() { <-stuck }
		done := make(chan error, 1)
		go func() { done <- beat() }()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Error("Heartbeat hangs for a minute")
		}
		if err := beat(); err != nil {
			t.Errorf("a minute later, on a healthy database, the next Heartbeat = %v: the turn is held for ever", err)
		}
		closed := make(chan struct{})
		go func() { c.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(time.Minute):
			t.Error("Close hangs for a minute")
		}
		close(stuck)
		<-closed
		db.Close()
	})
}

// TestAdvisoryNameStuckForEver: the first use of a session is abandoned while its driver goes
// on; it then takes another caller's request along to its dead session. The name must be free
// again when all is well.
func TestAdvisoryNameStuckForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{latency: 20 * time.Millisecond} // The first use takes longer than Timeout.
		d, _ := newAdvisory(t, s, Config{Timeout: 100 * time.Millisecond})
		go d.Acquire(t.Context(), "a", time.Hour)
		time.Sleep(50 * time.Millisecond)
		_, err := d.Acquire(t.Context(), "b", time.Hour)
		s.setLatency(0)
		time.Sleep(time.Hour)
		if s.holder("b") != 0 {
			t.Error("b is locked on the server")
		}
		if _, again := d.Acquire(t.Context(), "b", time.Hour); again != nil {
			h := d.claims["b"]
			t.Errorf("first: %v; an hour later, on a healthy server, Acquire = %v (session %d of the claim is dead, as all to %d; owed %v, pending %d)", err, again, h.session, d.dead, h.owed, len(d.pending))
		}
	})
}

// TestTurn: the turn goes to the waiter whose context ends first, of two that end at once to the
// one that came first, and to none that has left.
func TestTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turn turn
		if err := turn.take(t.Context()); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []string
		var all sync.WaitGroup
		wait := func(name string, d time.Duration, leaves bool) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			if d == 0 {
				ctx, cancel = context.WithCancel(t.Context())
			}
			all.Go(func() {
				defer cancel()
				err := turn.take(ctx)
				if (err != nil) != leaves {
					t.Errorf("%s: %v", name, err)
				}
				if err == nil {
					mu.Lock()
					order = append(order, name)
					mu.Unlock()
					turn.give()
				}
			})
			if leaves {
				time.AfterFunc(time.Millisecond, cancel)
			}
			synctest.Wait()
		}
		wait("never", 0, false)
		wait("an hour", time.Hour, false)
		wait("left", time.Minute, true)
		wait("a minute", time.Minute, false)
		wait("a minute too", time.Minute, false)
		wait("a second", time.Second, false)
		time.Sleep(10 * time.Millisecond)
		turn.give()
		all.Wait()
		if want := []string{"a second", "a minute", "a minute too", "an hour", "never"}; !slices.Equal(order, want) {
			t.Errorf("%q, want %q", order, want)
		}
		if turn.taken || len(turn.waiting) > 0 {
			t.Errorf("left behind: %+v", &turn)
		}
	})
}
