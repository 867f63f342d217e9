package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-4c80c132/coord"
)

// hooked is a driver that calls hooks. A connection made by it runs the hooks of the moment, so
// that a test can break a connection that is in use.
type hooked struct {
	driver driver.Driver
	url    atomic.Value                                        // string; of new connections
	dial   atomic.Pointer[func()]                              // runs before a connection is made
	send   atomic.Pointer[func(conn driver.Conn, text string)] // runs before each statement is sent
}

func newHooked(db *sql.DB, url string) *hooked {
	h := &hooked{driver: db.Driver()}
	h.url.Store(url)
	return h
}

func (h *hooked) Driver() driver.Driver { return h.driver }

func (h *hooked) Connect(context.Context) (driver.Conn, error) {
	if dial := h.dial.Load(); dial != nil {
		(*dial)()
	}
	conn, err := h.driver.Open(h.url.Load().(string))
	if err != nil {
		return nil, err
	}
	return &hookedConn{conn, h}, nil
}

// before sets the hook of statements.
func (h *hooked) before(send func(conn driver.Conn, text string)) { h.send.Store(&send) }

// once runs do before the next statement that names table. It returns a function that reports
// whether it has.
func (h *hooked) once(table string, do func(driver.Conn)) (done func() bool) {
	var claimed, over atomic.Bool
	h.before(func(conn driver.Conn, text string) {
		if strings.Contains(text, table) && claimed.CompareAndSwap(false, true) {
			do(conn)
			over.Store(true)
		}
	})
	return over.Load
}

type hookedConn struct {
	driver.Conn
	h *hooked
}

func (c *hookedConn) sending(text string) {
	if send := c.h.send.Load(); send != nil {
		(*send)(c.Conn, text)
	}
}

func (c *hookedConn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	stmt, err := c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	return &hookedStmt{stmt, c, text}, nil
}

func (c *hookedConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.sending(text)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

func (c *hookedConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.sending(text)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}

func (c *hookedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c *hookedConn) Ping(ctx context.Context) error { return c.Conn.(driver.Pinger).Ping(ctx) }

func (c *hookedConn) ResetSession(ctx context.Context) error {
	return c.Conn.(driver.SessionResetter).ResetSession(ctx)
}

func (c *hookedConn) IsValid() bool {
	valid, ok := c.Conn.(driver.Validator)
	return !ok || valid.IsValid()
}

type hookedStmt struct {
	driver.Stmt
	conn *hookedConn
	text string
}

func (s *hookedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.conn.sending(s.text)
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

func (s *hookedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.conn.sending(s.text)
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

// rig is a Coord with a pool of its own, whose connections lead through a proxy and a driver with
// hooks.
type rig struct {
	*hooked
	e     *env
	proxy *proxy
	db    *sql.DB
	c     *coord.Coord
}

// rigTimeout is the Timeout of a rig's Coord. Whatever hangs, a call returns within some of these;
// hangs is when a test gives up, which leaves time for a busy machine.
const (
	rigTimeout = time.Second
	hangs      = 15 * time.Second
)

func newRig(t testing.TB, e *env) *rig {
	t.Helper()
	r := &rig{e: e}
	var url string
	r.proxy, url = newProxy(t, e)
	r.hooked = newHooked(e.db, url)
	r.db = sql.OpenDB(r.hooked)
	t.Cleanup(func() {
		eventually(t, "every borrowed connection is given back", func() bool { return r.db.Stats().InUse == 0 })
		r.db.Close()
	})
	cfg := e.config()
	cfg.Timeout = rigTimeout
	r.c = newCoord(t, r.db, e.dialect, cfg)
	t.Cleanup(func() { // First: Close of the Coord needs a network.
		r.dial.Store(nil)
		r.send.Store(nil)
		r.proxy.heal()
	})
	return r
}

// cutAll ends every connection, which both sides notice.
func (p *proxy) cutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut()
}

// within returns the result of do, which must not take much longer than some Timeouts.
func within[T any](t testing.TB, what string, do func() T) T {
	t.Helper()
	done := make(chan T, 1)
	go func() { done <- do() }()
	select {
	case result := <-done:
		return result
	case <-time.After(hangs):
		t.Fatalf("%s has not returned after %s, want a few times %s", what, hangs, rigTimeout)
		panic("unreachable")
	}
}

// alive are the operations that keep a lease and a member alive.
var alive = []struct {
	name, table string
	do          func(ctx context.Context, c *coord.Coord) error
}{
	{"Renew", "coord_lease", func(ctx context.Context, c *coord.Coord) error {
		leases, err := c.Leases().Renew(ctx, "jobs", []int{3}, "a", time.Hour)
		if err == nil && len(leases) != 1 {
			err = coord.ErrLost
		}
		return err
	}},
	{"Heartbeat", "coord_member", func(ctx context.Context, c *coord.Coord) error {
		_, err := c.Members().Heartbeat(ctx, "web", "a", "", time.Hour, nil)
		return err
	}},
}

// TestHungDial: while no connection can be made, renewals and heartbeats fail after some Timeouts,
// several callers at a time too, and they succeed soon after the network works again, even if the
// old dials still hang.
func TestHungDial(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		for _, hang := range []struct {
			name       string
			begin, end func(r *rig, dial func())
		}{
			{"the server does not answer", func(r *rig, _ func()) { r.proxy.swallow() }, func(r *rig, _ func()) { r.proxy.heal() }},
			{"Open does not return", func(r *rig, dial func()) { r.dial.Store(&dial) }, func(r *rig, _ func()) { r.dial.Store(nil) }},
		} {
			t.Run(hang.name, func(t *testing.T) {
				r, forever := newRig(t, e), make(chan struct{})
				t.Cleanup(func() { close(forever) })
				dial := func() { <-forever }
				grant(t, r.c.Leases(), "a", time.Hour)
				for _, op := range alive {
					if err := op.do(t.Context(), r.c); err != nil {
						t.Fatal(err)
					}
				}
				hang.begin(r, dial)
				r.proxy.cutAll()
				for range 2 {
					within(t, "Renew or Heartbeat", func() (none struct{}) {
						var callers sync.WaitGroup
						for _, op := range slices.Repeat(alive, 3) {
							callers.Go(func() {
								if err := op.do(t.Context(), r.c); err == nil || errors.Is(err, coord.ErrLost) {
									t.Errorf("%s without a connection = %v, want the connection's error", op.name, err)
								}
							})
						}
						callers.Wait()
						return none
					})
				}
				hang.end(r, dial)
				for _, op := range alive {
					var err error
					eventually(t, op.name+" succeeds again", func() bool { err = op.do(t.Context(), r.c); return err == nil })
				}
				if _, err := r.c.Leases().Release(t.Context(), "jobs", 3, "a"); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// raise makes every statement that writes to a table fail in sessions that have set
// coord_test.fail, with the SQLSTATE that is its value.
const raise = `
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF coalesce(current_setting('coord_test.fail', true), '') <> '' THEN
		RAISE EXCEPTION 'this session is broken' USING ERRCODE = current_setting('coord_test.fail');
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON coord_lease EXECUTE FUNCTION fail();
CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON coord_member EXECUTE FUNCTION fail()`

// TestBrokenSession: after an error that is not the connection's, but that the session will give
// again and again, the next call succeeds.
func TestBrokenSession(t *testing.T) {
	type fault struct {
		state   string
		session []string // breaks the session that it runs on
		table   []string // breaks all sessions
		pool    bool     // sessions of the pool get over it too
	}
	faults := []fault{
		{state: "25006", session: []string{"SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"}},
		{state: "25P02", session: []string{"BEGIN", "SELECT 1 / 0"}},
		{state: "26000", session: []string{"DEALLOCATE ALL"}, pool: true},
		{state: "0A000", table: []string{"ALTER TABLE coord_lease ALTER COLUMN epoch TYPE numeric", "ALTER TABLE coord_lease ALTER COLUMN epoch TYPE bigint"}},
	}
	for _, state := range []string{"0A000", "53100", "58030", "XX000"} { // As the server may say for reasons of its own.
		faults = append(faults, fault{state: state, session: []string{"SET coord_test.fail = '" + state + "'"}})
	}
	owners := alive[0]
	owners.name, owners.do = "Owners", func(ctx context.Context, c *coord.Coord) error {
		_, err := c.Leases().Owners(ctx, "jobs")
		return err
	}
	eachPostgres(t, func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		grant(t, e.coord(t).Leases(), "a", time.Hour)
		e.exec(t, raise)
		for _, f := range faults {
			ops := alive
			switch {
			case f.pool:
				ops = append(slices.Clone(alive), owners)
			case f.table != nil: // The columns of a heartbeat's answer never change their types.
				ops = alive[:1]
			}
			for _, op := range ops {
				t.Run(strings.Join(append([]string{f.state, op.name}, f.session...), " "), func(t *testing.T) {
					r := newRig(t, e)
					r.db.SetMaxOpenConns(2) // One is pinned, and all else runs on the other.
					must := func(when string) {
						t.Helper()
						if err := op.do(t.Context(), r.c); err != nil {
							t.Fatalf("%s %s: %v", op.name, when, err)
						}
					}
					try := func() {
						t.Helper()
						err := op.do(t.Context(), r.c)
						var server interface{ SQLState() string }
						if err != nil && (!errors.As(err, &server) || server.SQLState() != f.state) {
							t.Fatalf("%s on a broken session = %v, want nil or SQLSTATE %s", op.name, err, f.state)
						}
					}
					must("before")
					for _, query := range f.table {
						e.exec(t, query)
						try()
						must("after " + query)
					}
					if f.session == nil {
						return
					}
					done := r.once(op.table, func(conn driver.Conn) {
						for _, query := range f.session {
							_, _ = conn.(driver.ExecerContext).ExecContext(context.Background(), query, nil) // SELECT 1 / 0 fails.
						}
					})
					try()
					if !done() {
						t.Fatal("no session was broken")
					}
					must("after the error")
				})
			}
		}
	})
}

// holdings are one Coord's holds of every kind, and what became of them.
type holdings struct {
	lost chan string // the name of each that was lost
	end  func() error
}

// hold takes two mutexes, two sets of ids, the lead, and partitions if any, all for a TTL.
func (r *rig) hold(t testing.TB, ttl time.Duration, partitions int) *holdings {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	h := &holdings{lost: make(chan string, 100)}
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	watch := func(name string, lost <-chan struct{}) {
		wg.Go(func() {
			select {
			case <-lost:
				h.lost <- name
			case <-ctx.Done():
			}
		})
	}
	m, err := tableMutex(r.c, coord.MutexConfig{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	ids, err := r.c.EIDLocker(coord.EIDConfig{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"1", "2"} {
		lock, err := m.Lock(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		watch("mutex "+name, lock.Done())
		lockIDs(t, ids, name, name+"x", name+"y")
		watch("ids "+name, ids.Lost(name))
	}
	started := make(chan struct{}, 100)
	fn := func(under context.Context, lease coord.Lease) error {
		started <- struct{}{}
		<-under.Done()
		if ctx.Err() == nil {
			h.lost <- fmt.Sprint("lease ", lease.Group, " ", lease.Partition)
		}
		return nil
	}
	ends := make(chan error, 2)
	wg.Go(func() {
		var err error
		if partitions > 0 {
			err = r.c.RunPartitions(ctx, coord.PartitionConfig{Service: "web", Group: "jobs", Partitions: partitions, TTL: ttl}, fn)
		}
		ends <- err
	})
	wg.Go(func() { ends <- r.c.RunLeader(ctx, "lead", ttl, fn) })
	for range partitions + 1 {
		select {
		case <-started:
		case <-time.After(hangs):
			t.Fatal("not all partitions were started")
		}
	}
	h.end = func() error { cancel(); return errors.Join(<-ends, <-ends) }
	return h
}

// keep waits for a time and fails the test if anything except what is excepted is lost meanwhile.
func (h *holdings) keep(t testing.TB, during time.Duration, except ...string) {
	t.Helper()
	for over := time.After(during); ; {
		select {
		case name := <-h.lost:
			if !slices.Contains(except, name) {
				t.Errorf("%s was lost", name)
			}
		case <-over:
			return
		}
	}
}

// TestDeadConnections: the pinned connection and all idle ones of the pool die, and nobody is told.
// Nothing is lost if TTL is three times Timeout.
func TestDeadConnections(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		const idle = 10 // More than there are goroutines that would use up dead ones for each other.
		r := newRig(t, e)
		r.db.SetMaxIdleConns(idle)
		h := r.hold(t, 3*rigTimeout, 4)
		var conns []*sql.Conn
		for range idle {
			conn, err := r.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
		}
		for _, conn := range conns {
			conn.Close()
		}
		if n := r.db.Stats().Idle; n < idle-4 { // Some may be in use.
			t.Fatalf("%d connections are idle, want %d or a few less", n, idle)
		}
		r.url.Store(e.url) // New connections do not lead through the proxy.
		r.proxy.swallow()
		h.keep(t, 9*rigTimeout)
		if err := h.end(); err != nil {
			t.Errorf("the end of the runs = %v", err)
		}
	})
}

// TestAdvisoryCloseDuringAcquire: Close does not wait for an Acquire that waits for a connection,
// for the session itself or for the second one that tells a pooler.
func TestAdvisoryCloseDuringAcquire(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		for _, busy := range []int{2, 1} {
			r := newRig(t, e)
			r.db.SetMaxOpenConns(2)
			for range busy {
				conn, err := r.db.Conn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
			}
			d, err := r.c.AdvisoryDriver(coord.DriverConfig{})
			if err != nil {
				t.Fatal(err)
			}
			acquired := make(chan error, 1)
			go func() { _, err := d.Acquire(t.Context(), "a", time.Hour); acquired <- err }()
			eventually(t, "Acquire waits for a connection", func() bool { return r.db.Stats().WaitCount > 0 })
			if err := within(t, "Close", d.Close); err != nil {
				t.Errorf("Close = %v", err)
			}
			if err := within(t, "Acquire", func() error { return <-acquired }); err == nil || errors.Is(err, coord.ErrHeld) {
				t.Errorf("Acquire on a pool that is used up = %v, want an error", err)
			}
		}
	})
}

// TestPgxPool: closing a connection of stdlib.OpenDBFromPool only returns it to the pgxpool. The
// server's session ends all the same, and with it what it had locked.
func TestPgxPool(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		for _, test := range []struct {
			name string
			drop func(t *testing.T, d *coord.AdvisoryDriver, lock coord.DriverLock, p *proxy)
		}{
			{"Close", func(t *testing.T, d *coord.AdvisoryDriver, _ coord.DriverLock, _ *proxy) {
				if err := d.Close(); err != nil {
					t.Errorf("Close = %v", err)
				}
			}},
			{"a release that can't be settled", func(t *testing.T, d *coord.AdvisoryDriver, lock coord.DriverLock, _ *proxy) {
				if ok, err := d.Release(t.Context(), lock); ok || err == nil {
					t.Errorf("Release = %v, %v, want the server's error", ok, err)
				}
			}},
			{"a session that was abandoned", func(t *testing.T, d *coord.AdvisoryDriver, lock coord.DriverLock, p *proxy) {
				p.delay.Store(int64(2 * rigTimeout))
				defer p.delay.Store(0)
				if ok, err := d.Extend(t.Context(), lock, time.Hour); ok || err == nil {
					t.Errorf("Extend = %v, %v, want that it took too long", ok, err)
				}
			}},
		} {
			t.Run(test.name, func(t *testing.T) {
				p, url := newProxy(t, e)
				config, err := pgxpool.ParseConfig(url)
				if err != nil {
					t.Fatal(err)
				}
				config.MaxConns = 4
				pool, err := pgxpool.NewWithConfig(t.Context(), config)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(pool.Close)
				db := stdlib.OpenDBFromPool(pool)
				t.Cleanup(func() { db.Close() })
				dialect := copyDialect(t, e.dialect) // One that can't release "bad".
				file := dialect.files["advisory.sql"]
				file.Data = []byte(strings.ReplaceAll(string(file.Data), "pg_advisory_unlock((value ->> 0)::bigint)",
					fmt.Sprintf("pg_advisory_unlock((value ->> 0)::bigint) IS NOT NULL AND 1 / ((value ->> 0)::bigint - %d) IS NOT NULL", coord.AdvisoryKey("bad"))))
				d, err := newCoord(t, db, dialect, coord.Config{Timeout: rigTimeout}).AdvisoryDriver(coord.DriverConfig{})
				if err != nil {
					t.Fatal(err)
				}
				var lock coord.DriverLock
				for _, name := range []string{"other", "bad"} {
					if lock, err = d.Acquire(t.Context(), name, time.Hour); err != nil {
						t.Fatal(err)
					}
				}
				if n := e.sessionLocks(t); n != 2 {
					t.Fatalf("%d locks on the server, want 2", n)
				}
				test.drop(t, d, lock, p)
				eventually(t, "the server has no lock", func() bool { return e.sessionLocks(t) == 0 })
				rival := e.mutexDriver(t, "advisory")
				for _, name := range []string{"other", "bad"} {
					got, err := rival.Acquire(t.Context(), name, time.Hour)
					if err != nil {
						t.Errorf("Acquire(%s) by another = %v", name, err)
						continue
					}
					if ok, err := rival.Release(t.Context(), got); !ok || err != nil {
						t.Errorf("Release(%s) by another = %v, %v", name, ok, err)
					}
				}
			})
		}
	})
}

// TestAcquireHoldsUpNoRenewal: callers that wait in Acquire for leases that another transaction
// guards leave renewals alone.
func TestAcquireHoldsUpNoRenewal(t *testing.T) {
	const ttl = 4 * rigTimeout
	eachPostgres(t, func(t *testing.T, e *env) {
		former, r := e.coord(t).Leases(), newRig(t, e)
		if _, err := r.c.Leases().Acquire(t.Context(), "jobs", 2, "me", ttl); err != nil {
			t.Fatal(err)
		}
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		for p := range 2 {
			lease, err := former.Acquire(t.Context(), "jobs", p, "former", 300*time.Millisecond)
			if err == nil {
				err = former.Guard(t.Context(), tx, lease)
			}
			if err != nil {
				t.Fatal(err)
			}
			e.pass(t, lease.ExpiresAt)
		}
		taken := make(chan error, 2)
		for p := range 2 {
			go func() { _, err := r.c.Leases().Acquire(t.Context(), "jobs", p, "me", time.Hour); taken <- err }()
		}
		renewals := time.NewTicker(ttl / 3)
		defer renewals.Stop()
		for range 6 { // In two TTLs.
			select {
			case err := <-taken:
				t.Fatalf("Acquire of a lease that is guarded = %v, want to wait", err)
			case <-renewals.C:
			}
			began := time.Now()
			if leases, err := r.c.Leases().Renew(t.Context(), "jobs", []int{2}, "me", ttl); len(leases) != 1 || err != nil {
				t.Fatalf("Renew = %v, %v, want the lease", leases, err)
			}
			if took := time.Since(began); took > rigTimeout {
				t.Errorf("Renew took %v, want an answer at once", took)
			}
		}
		tx.Rollback()
		for range 2 {
			if err := within(t, "Acquire", func() error { return <-taken }); err != nil {
				t.Errorf("Acquire after the guard = %v", err)
			}
		}
	})
}

// TestSlowStatements: each statement takes 60 % of Timeout, and TTL is six Timeouts, as by default.
func TestSlowStatements(t *testing.T) {
	const ttl = 6 * rigTimeout
	eachPostgres(t, func(t *testing.T, e *env) {
		r := newRig(t, e)
		h := r.hold(t, ttl, 0)
		r.before(func(driver.Conn, string) { time.Sleep(rigTimeout * 6 / 10) })
		h.keep(t, 3*ttl)
	})
}

// TestLockedRowsLoseNothingElse: another transaction has locked a row of each table for longer
// than the TTL.
func TestLockedRowsLoseNothingElse(t *testing.T) {
	const ttl = 3 * rigTimeout
	eachPostgres(t, func(t *testing.T, e *env) {
		r := newRig(t, e)
		h := r.hold(t, ttl, 4)
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		for _, rows := range []string{"coord_member WHERE service = 'web'", "coord_lease WHERE group_name = 'jobs' AND partition = 0",
			"coord_mutex WHERE name = '1'", "coord_eidlock WHERE eid = '1x'"} {
			if result, err := tx.Exec("SELECT FROM " + rows + " FOR UPDATE"); err != nil {
				t.Fatal(err)
			} else if n, _ := result.RowsAffected(); n != 1 {
				t.Fatalf("%d rows of %s are locked, want 1", n, rows)
			}
		}
		h.keep(t, 3*ttl, "mutex 1", "ids 1", "lease jobs 0")
		tx.Rollback()
		if err := within(t, "the end of the runs", h.end); err != nil {
			t.Errorf("the end of the runs = %v", err)
		}
	})
}

// TestEndsOnABlackHole: what ends a hold returns within some Timeouts though nothing answers,
// renewals included, however long the TTL.
func TestEndsOnABlackHole(t *testing.T) {
	const ttl, every = time.Hour, 50 * time.Millisecond
	eachPostgres(t, func(t *testing.T, e *env) {
		r := newRig(t, e)
		type end struct {
			name string
			do   func() error
		}
		var ends []end
		for _, mode := range modes {
			d, err := newDriver(r.c, mode, coord.DriverConfig{})
			if err != nil {
				t.Fatal(err)
			}
			lock, err := newMutex(t, d, coord.MutexConfig{TTL: ttl, Renew: every}).Lock(t.Context(), "m")
			if err != nil {
				t.Fatal(err)
			}
			ends = append(ends, end{"Unlock, " + mode, func() error { return lock.Unlock(t.Context()) }})
		}
		ids, err := r.c.EIDLocker(coord.EIDConfig{TTL: ttl, Heartbeat: every})
		if err != nil {
			t.Fatal(err)
		}
		lockIDs(t, ids, "tx", "1", "2")
		released := errors.New("ReleaseLocks has no result")
		ends = append(ends, end{"ReleaseLocks", func() error { ids.ReleaseLocks(t.Context(), "tx"); return released }})
		for _, heartbeat := range []time.Duration{0, every} {
			ctx, cancel := context.WithCancel(context.Background())
			t.Cleanup(cancel)
			started, done := make(chan struct{}), make(chan error, 1)
			cfg := coord.PartitionConfig{Service: "web", Group: fmt.Sprint(heartbeat), Partitions: 1, TTL: ttl, Heartbeat: heartbeat}
			go func() {
				done <- r.c.RunPartitions(ctx, cfg, func(ctx context.Context, _ coord.Lease) error {
					close(started)
					<-ctx.Done()
					return nil
				})
			}()
			<-started
			ends = append(ends, end{"the end of a run with Heartbeat " + heartbeat.String(), func() error { cancel(); return <-done }})
		}
		eventually(t, "a renewal is sent", r.once("coord_mutex", func(driver.Conn) { r.proxy.swallow() }))
		for _, end := range ends {
			if err := within(t, end.name, end.do); err == nil {
				t.Errorf("%s = nil though the database is out of reach", end.name)
			}
		}
		within(t, "Close", r.c.Close)
	})
}

// once are one call of each kind on a Coord, which succeeds any number of times.
func once(c *coord.Coord) (map[string]func(context.Context) error, error) {
	table, failed := c.TableDriver(coord.DriverConfig{})
	advisory, err := c.AdvisoryDriver(coord.DriverConfig{})
	failed = errors.Join(failed, err)
	ids, err := c.EIDLocker(coord.EIDConfig{})
	failed = errors.Join(failed, err)
	calls := map[string]func(context.Context) error{
		"Acquire": func(ctx context.Context) error {
			_, err := c.Leases().Acquire(ctx, "jobs", 3, "a", time.Hour)
			return err
		},
		"AcquireLocks": func(ctx context.Context) error {
			defer ids.ReleaseLocks(ctx, "tx")
			return ids.AcquireLocks(ctx, "tx", "1", "2")
		},
		"Reserve": func(ctx context.Context) error {
			_, err := c.Reservations().Reserve(ctx, names, "k", ref("o"), "h", time.Hour)
			return err
		},
		"Migrate": func(ctx context.Context) error { return c.Migrate(ctx, names) },
	}
	for _, op := range alive {
		calls[op.name] = func(ctx context.Context) error { return op.do(ctx, c) }
	}
	for mode, d := range map[string]coord.MutexDriver{"table": table, "advisory": advisory} {
		m, err := coord.NewMutex(d, coord.MutexConfig{})
		failed = errors.Join(failed, err)
		calls["Lock, "+mode] = func(ctx context.Context) error {
			lock, err := m.Lock(ctx, "m")
			if err != nil {
				return err
			}
			return lock.Unlock(ctx)
		}
	}
	return calls, failed
}

func init() { roles["panics"] = panics }

// panics makes the driver panic in the first statement of a call, and checks that the caller gets
// the panic, and that nothing stays held.
func panics(o orders, db *sql.DB, _ *coord.Coord) error {
	ctx, h := context.Background(), newHooked(db, o.URL)
	c, err := coord.New(sql.OpenDB(h), coord.Postgres, coord.Config{Timeout: rigTimeout}) // The pool is not closed: it may wait for what panicked.
	if err != nil {
		return err
	}
	calls, err := once(c)
	if err != nil {
		return err
	}
	if o.Node != "Migrate" { // Else it is a first use, of which the panic would be.
		err = errors.Join(calls["Acquire"](ctx), calls[o.Node](ctx), calls[o.Node](ctx))
	}
	if err != nil {
		return fmt.Errorf("before: %w", err)
	}
	const bug = "a bug of the driver"
	h.once("", func(driver.Conn) { panic(bug) })
	got := func() (value any) {
		defer func() { value = recover() }()
		err = calls[o.Node](ctx)
		return nil
	}()
	if !strings.Contains(fmt.Sprint(got), bug) {
		return fmt.Errorf("the caller got the panic %v and the error %v, want a panic with %q", got, err, bug)
	}
	done := make(chan error)
	go func() { done <- calls[o.Node](ctx); done <- c.Close() }()
	for _, what := range []string{"the next call", "Close"} {
		select {
		case err := <-done:
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		case <-time.After(hangs):
			return fmt.Errorf("%s does not return", what)
		}
	}
	return nil
}

// TestDriverPanics: a panic of the driver reaches the caller. Each call has a process of its own,
// since a panic that reaches no caller ends the process.
func TestDriverPanics(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		calls, err := once(e.coord(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range slices.Sorted(maps.Keys(calls)) {
			t.Run(name, func(t *testing.T) {
				e.start(t, "panics", orders{Node: name}).wait(t, func(line string) { t.Log(line) })
			})
		}
	})
}
