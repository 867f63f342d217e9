package coord

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
)

// advisoryServer is a server that knows the statements of an AdvisoryDriver.
type advisoryServer struct {
	fakeDriver

	mu      sync.Mutex            // guards what follows
	fault   func(statement) fault // may be nil
	latency time.Duration
	marks   map[int]string
	locks   map[int64]int // the connection that holds a key
	dead    map[int]bool
}

func (s *advisoryServer) setFault(f func(statement) fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

func (s *advisoryServer) setLatency(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.latency = d
}

// fault is what goes wrong with a statement.
type fault struct {
	err  error
	done bool          // it has its effect all the same
	wait time.Duration // for its reply
}

type advisoryConn struct {
	*fakeConn
	server *advisoryServer
}

func (c advisoryConn) Begin() (driver.Tx, error) { return c, nil }
func (c advisoryConn) Commit() error             { return nil }
func (c advisoryConn) Rollback() error           { return nil }
func (c advisoryConn) Close() error {
	c.server.end(c.id)
	return c.fakeConn.Close()
}

func (s *advisoryServer) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := s.fakeDriver.Connect(ctx)
	return advisoryConn{conn.(*fakeConn), s}, err
}

// end ends a session, as a server does.
func (s *advisoryServer) end(conn int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead[conn] = true
	for key, holder := range s.locks {
		if holder == conn {
			delete(s.locks, key)
		}
	}
}

// holder is the connection that holds a name, or 0.
func (s *advisoryServer) holder(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locks[AdvisoryKey(name)]
}

// newAdvisory returns an AdvisoryDriver on a server, and what its listener was told.
func newAdvisory(t *testing.T, s *advisoryServer, cfg Config) (*AdvisoryDriver, *[]string) {
	t.Helper()
	s.marks, s.locks, s.dead = map[int]string{}, map[int64]int{}, map[int]bool{}
	db := sql.OpenDB(s)
	cfg.NoPrepare = true
	c, err := New(db, Postgres, cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.answer = func(st statement) (driver.Rows, error) { return s.run(&c.advisory, st) }
	t.Cleanup(func() { c.Close(); db.Close() })
	d, err := c.AdvisoryDriver(DriverConfig{})
	if err != nil {
		t.Fatal(err)
	}
	told := new([]string)
	d.OnLost(func(names []string) { *told = append(*told, names...) })
	return d, told
}

func (s *advisoryServer) run(texts *advisorySQL, st statement) (driver.Rows, error) {
	s.mu.Lock()
	fails, wait := s.fault, s.latency
	s.mu.Unlock()
	var f fault
	if fails != nil {
		f = fails(st)
	}
	time.Sleep(wait + f.wait)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dead[st.conn] {
		return nil, driver.ErrBadConn
	}
	if f.err != nil && !f.done {
		return nil, f.err
	}
	var rows driver.Rows
	if st.text == texts.exchange {
		rows = s.exchange(st)
	} else {
		row := oneRow(s.effect(texts, st))
		rows = advisoryRow{&row, len(row)}
	}
	if f.err != nil {
		return nil, f.err
	}
	return rows, nil
}

// request is what one name is asked for.
type request struct {
	key  int64
	lock bool
}

// requestsOf are the requests of a statement.
func requestsOf(st statement) (all []request) {
	var list [][2]json.RawMessage
	err := json.Unmarshal([]byte(st.args[0].Value.(string)), &list)
	for _, fields := range list {
		var r request
		err = errors.Join(err, json.Unmarshal(fields[0], &r.key), json.Unmarshal(fields[1], &r.lock))
		all = append(all, r)
	}
	if err != nil {
		panic(err)
	}
	return all
}

// asksFor reports whether a statement locks a name, or unlocks it.
func (d *AdvisoryDriver) asksFor(st statement, lock bool, name string) bool {
	return st.text == d.c.advisory.exchange && slices.Contains(requestsOf(st), request{AdvisoryKey(name), lock})
}

// exchange locks and unlocks. s.mu must be held.
func (s *advisoryServer) exchange(st statement) driver.Rows {
	rows := &fewRows{}
	for i, r := range requestsOf(st) {
		held := s.locks[r.key]
		var answer driver.Value
		switch {
		case st.args[1].Value != s.marks[st.conn]:
		case r.lock && held == 0:
			s.locks[r.key] = st.conn
			answer = true
		default:
			answer = held == st.conn
			if held == st.conn && !r.lock {
				delete(s.locks, r.key)
			}
		}
		*rows = append(*rows, []driver.Value{int64(i + 1), answer})
	}
	return rows
}

// effect runs a statement. s.mu must be held.
func (s *advisoryServer) effect(texts *advisorySQL, st statement) []driver.Value {
	switch st.text {
	case texts.identify:
		return []driver.Value{s.marks[st.conn], true}
	case texts.mark:
		s.marks[st.conn] = st.args[0].Value.(string)
		return []driver.Value{st.args[0].Value}
	}
	if len(st.args) == 0 { // The end of the session.
		s.dead[st.conn] = true
		maps.DeleteFunc(s.locks, func(_ int64, holder int) bool { return holder == st.conn })
		return []driver.Value{true}
	}
	panic("unknown statement " + st.text)
}

// advisoryRow is a oneRow of so many columns.
type advisoryRow struct {
	*oneRow
	columns int
}

func (r advisoryRow) Columns() []string { return make([]string, r.columns) }

func mustAcquire(t *testing.T, d *AdvisoryDriver, name string) DriverLock {
	t.Helper()
	lock, err := d.Acquire(t.Context(), name, time.Hour)
	if err != nil {
		t.Fatalf("Acquire(%s) = %v", name, err)
	}
	return lock
}

// TestAdvisoryReleasesQueue: more releases than the session has time for, one after the
// other, leave nothing locked.
func TestAdvisoryReleasesQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{latency: 10 * time.Millisecond}
		d, told := newAdvisory(t, s, Config{Timeout: 100 * time.Millisecond})
		var locks []DriverLock
		for i := range 40 {
			locks = append(locks, mustAcquire(t, d, fmt.Sprint(i)))
		}
		var all sync.WaitGroup
		for _, lock := range locks {
			all.Go(func() { d.Release(t.Context(), lock) })
		}
		all.Wait()
		time.Sleep(time.Second)
		for _, lock := range locks {
			if s.holder(lock.Name) != 0 {
				t.Errorf("%s is still locked", lock.Name)
			}
			mustAcquire(t, d, lock.Name)
		}
		if len(*told) != 0 {
			t.Errorf("OnLost(%v), want nothing", *told)
		}
	})
}

// TestAdvisoryReleasePending: a release that ran out of time while others had the
// session is sent by those, or in the background.
func TestAdvisoryReleasePending(t *testing.T) {
	for _, fails := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &advisoryServer{}
			d, told := newAdvisory(t, s, Config{Timeout: 100 * time.Millisecond})
			lock := mustAcquire(t, d, "a")
			mustAcquire(t, d, "b")
			<-time.After(time.Millisecond) // So that what follows is probed.
			s.setFault(func(st statement) fault {
				f := fault{wait: 60 * time.Millisecond}
				if fails && d.asksFor(st, false, "a") {
					f.err = driver.ErrBadConn
				}
				return f
			})
			go d.Acquire(t.Context(), "c", time.Hour) // Runs until 60 ms.
			synctest.Wait()
			go d.Acquire(t.Context(), "d", time.Hour) // Is in the queue, and sends the release from 60 to 120 ms.
			synctest.Wait()
			if ok, err := d.Release(t.Context(), lock); ok || !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("Release = %v, %v, want DeadlineExceeded", ok, err)
			}
			if ok, err := d.Extend(t.Context(), lock, time.Hour); ok || err != nil {
				t.Errorf("Extend of a lock that was given up = %v, %v, want false", ok, err)
			}
			if _, err := d.Acquire(t.Context(), "a", time.Hour); !errors.Is(err, ErrHeld) {
				t.Errorf("Acquire before it was released = %v, want ErrHeld", err)
			}
			time.Sleep(time.Second)
			s.setFault(nil)
			if s.holder("a") != 0 {
				t.Error("a is still locked")
			}
			if ok, err := d.Release(t.Context(), lock); ok || err != nil {
				t.Errorf("Release again = %v, %v, want false", ok, err)
			}
			mustAcquire(t, d, "a")
			want := map[bool][]string{true: {"a", "b", "c"}}[fails]
			if !slices.Equal(*told, want) {
				t.Errorf("fails %v: OnLost(%v), want %v", fails, *told, want)
			}
		})
	}
}

// TestAdvisoryReleaseInBackground: nobody else uses the session.
func TestAdvisoryReleaseInBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, _ := newAdvisory(t, s, Config{Timeout: 100 * time.Millisecond})
		lock := mustAcquire(t, d, "a")
		_ = d.session.turn.take(context.Background()) // An operation that takes long.
		if ok, err := d.Release(t.Context(), lock); ok || err == nil {
			t.Fatalf("Release = %v, %v, want an error", ok, err)
		}
		d.session.turn.give()
		synctest.Wait()
		if s.holder("a") != 0 {
			t.Error("a is still locked")
		}
		mustAcquire(t, d, "a")
	})
}

// TestAdvisoryCloseWithReleasePending: Close does not wait for the session's turn to
// send it. The session ends, which frees the name, and is reported once.
func TestAdvisoryCloseWithReleasePending(t *testing.T) {
	for _, whole := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &advisoryServer{}
			d, told := newAdvisory(t, s, Config{Timeout: 100 * time.Millisecond})
			lock := mustAcquire(t, d, "a")
			_ = d.session.turn.take(context.Background()) // An operation that takes long.
			if ok, err := d.Release(t.Context(), lock); ok || err == nil {
				t.Fatalf("Release = %v, %v, want an error", ok, err)
			}
			closed := make(chan error, 1)
			go func() {
				if whole {
					closed <- d.c.Close()
				} else {
					closed <- d.Close()
				}
			}()
			synctest.Wait()
			d.session.turn.give()
			if err := <-closed; err != nil {
				t.Errorf("Close = %v", err)
			}
			if s.holder("a") != 0 || !slices.Equal(*told, []string{"a"}) {
				t.Errorf("held by %d, OnLost(%v), want a free and reported", s.holder("a"), *told)
			}
			if len(d.claims) != 0 || len(d.pending) != 0 || d.flushing {
				t.Errorf("the driver still knows %v, %v", d.claims, d.pending)
			}
		})
	}
}

// TestAdvisoryReleaseTwice: of two at once, one has released it. A lock that was
// released can't release the next of its name.
func TestAdvisoryReleaseTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{latency: time.Millisecond}
		d, _ := newAdvisory(t, s, Config{})
		old := mustAcquire(t, d, "a")
		results := make(chan bool, 2)
		for range cap(results) {
			go func() {
				ok, err := d.Release(t.Context(), old)
				if err != nil {
					t.Errorf("Release = %v", err)
				}
				results <- ok
			}()
		}
		if first, second := <-results, <-results; first == second {
			t.Errorf("Release = %v and %v, want true once", first, second)
		}
		next := mustAcquire(t, d, "a")
		if ok, err := d.Extend(t.Context(), old, time.Hour); ok || err != nil {
			t.Errorf("Extend of a released lock = %v, %v, want false", ok, err)
		}
		if ok, err := d.Release(t.Context(), old); ok || err != nil {
			t.Errorf("Release of a released lock = %v, %v, want false", ok, err)
		}
		if s.holder("a") == 0 {
			t.Error("the release of an old lock has released the next")
		}
		if ok, err := d.Release(t.Context(), next); !ok || err != nil {
			t.Errorf("Release = %v, %v, want true", ok, err)
		}
	})
}

// TestAdvisoryReleaseDuringClose: everything ends, and each lock either was released or
// is reported as lost, once.
func TestAdvisoryReleaseDuringClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, told := newAdvisory(t, s, Config{})
		var locks []DriverLock
		for i := range 5 {
			locks = append(locks, mustAcquire(t, d, fmt.Sprint(i)))
		}
		s.latency = time.Second
		released := make(chan string, len(locks))
		var all sync.WaitGroup
		for i, lock := range locks {
			all.Go(func() {
				time.Sleep(time.Duration(i) * 300 * time.Millisecond)
				if ok, _ := d.Release(t.Context(), lock); ok {
					released <- lock.Name
				}
			})
		}
		time.Sleep(500 * time.Millisecond)
		d.Close()
		all.Wait()
		close(released)
		ended := slices.Clone(*told)
		for name := range released {
			ended = append(ended, name)
		}
		slices.Sort(ended)
		if want := []string{"0", "1", "2", "3", "4"}; !slices.Equal(ended, want) {
			t.Errorf("released or reported: %v, want %v", ended, want)
		}
		if len(s.locks) != 0 {
			t.Errorf("%d locks are left", len(s.locks))
		}
	})
}

// TestAdvisoryRefusedStatement: an error of the server about one name loses no other
// name, whatever the statement did, unless what the session holds can't be settled.
func TestAdvisoryRefusedStatement(t *testing.T) {
	for _, section := range []string{"lock", "unlock", "both", "identify"} {
		for _, done := range []bool{false, true} {
			for _, times := range []int{1, 2} {
				t.Run(fmt.Sprint(section, "/done=", done, "/times=", times), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { refuseStatement(t, section, done, times) })
				})
			}
		}
	}
}

func refuseStatement(t *testing.T, section string, done bool, times int) {
	s := &advisoryServer{}
	d, told := newAdvisory(t, s, Config{})
	kept := mustAcquire(t, d, "kept")
	lock, other := mustAcquire(t, d, "a"), mustAcquire(t, d, "b")
	time.Sleep(time.Millisecond)
	opened, _ := s.connections()
	s.setFault(func(st statement) fault {
		if st.conn != 1 || times == 0 {
			return fault{}
		}
		times--
		return fault{err: &pq.Error{Code: "53200"}, done: done}
	})
	settled := times == 1
	var err error
	switch section {
	case "lock":
		_, err = d.Acquire(t.Context(), "c", time.Hour)
		if err == nil || errors.Is(err, ErrHeld) {
			t.Errorf("Acquire = %v, want the server's error", err)
		}
	case "identify":
		var ok bool
		if ok, err = d.Extend(t.Context(), lock, time.Hour); ok != settled || (err == nil) != settled {
			t.Errorf("Extend = %v, %v", ok, err)
		}
	case "both":
		d.giveUp(other)
		if _, err := d.claim("d", nil); err != nil {
			t.Fatal(err)
		}
		fallthrough
	case "unlock":
		var ok bool
		if ok, err = d.Release(t.Context(), lock); ok != settled || (err == nil) != settled {
			t.Errorf("Release = %v, %v", ok, err)
		}
	}
	if ok, err := d.Extend(t.Context(), kept, time.Hour); ok != settled || err != nil {
		t.Errorf("Extend of another lock = %v, %v, want %v", ok, err, settled)
	}
	synctest.Wait() // A session that is discarded ends in the background.
	if s.holder("c") != 0 || section != "lock" && section != "identify" && s.holder("a") != 0 {
		t.Error("the name is still locked on the server")
	}
	mustAcquire(t, d, "c")
	if now, _ := s.connections(); settled && (now != opened || len(*told) != 0) {
		t.Errorf("%d connections instead of %d, OnLost(%v)", now, opened, *told)
	}
	if want := []string{"a", "b", "kept"}; !settled && !slices.Equal(*told, want) {
		t.Errorf("OnLost(%v), want %v", *told, want)
	}
}

// TestAdvisoryIdleSessionEnded: the next lock is granted on a new session, and the
// locks of the old one are lost, once. A new session that fails is not replaced again.
func TestAdvisoryIdleSessionEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, told := newAdvisory(t, s, Config{})
		old := mustAcquire(t, d, "a")
		s.end(1)
		mustAcquire(t, d, "b")
		if !slices.Equal(*told, []string{"a"}) {
			t.Errorf("OnLost(%v), want a", *told)
		}
		mustAcquire(t, d, "a")
		if ok, err := d.Release(t.Context(), old); ok || err != nil || s.holder("a") == 0 {
			t.Errorf("Release of the old session's lock = %v, %v, want false", ok, err)
		}
		s.setFault(func(st statement) fault {
			if d.asksFor(st, true, "c") {
				s.end(st.conn)
			}
			return fault{}
		})
		if _, err := d.Acquire(t.Context(), "c", time.Hour); err == nil || errors.Is(err, ErrHeld) {
			t.Errorf("Acquire on two sessions that end = %v, want the driver's error", err)
		}
		asked := slices.DeleteFunc(s.statements(), func(st statement) bool { return !d.asksFor(st, true, "c") })
		if len(asked) != 2 {
			t.Errorf("%d requests, want 2", len(asked))
		}
		s.setFault(nil)
		mustAcquire(t, d, "c")
	})
}

// TestAdvisoryRequestsTravelTogether: what queues for the session goes in one statement.
func TestAdvisoryRequestsTravelTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, told := newAdvisory(t, s, Config{})
		held := mustAcquire(t, d, "held")
		s.latency = 10 * time.Millisecond
		sent, start := len(s.statements()), time.Now()
		var all sync.WaitGroup
		for i := range 400 {
			all.Go(func() { mustAcquire(t, d, fmt.Sprint(i)) })
		}
		all.Go(func() {
			if ok, err := d.Release(t.Context(), held); !ok || err != nil {
				t.Errorf("Release = %v, %v", ok, err)
			}
		})
		all.Wait()
		if n := len(s.statements()) - sent; n > 3 || time.Since(start) > 30*time.Millisecond {
			t.Errorf("%d statements in %v, want one or two", n, time.Since(start))
		}
		for i := range 400 {
			if s.holder(fmt.Sprint(i)) == 0 {
				t.Errorf("%d is not locked", i)
			}
		}
		if len(*told) != 0 || s.holder("held") != 0 {
			t.Errorf("OnLost(%v), held by %d", *told, s.holder("held"))
		}
	})
}

// TestAdvisoryLeavesInFlight: a caller whose context ends while another's turn asks for its
// lock gets the answer, or if there is none within Timeout, what is granted later is released.
func TestAdvisoryLeavesInFlight(t *testing.T) {
	for _, latency := range []time.Duration{40 * time.Millisecond, 90 * time.Millisecond, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			s := &advisoryServer{}
			d, _ := newAdvisory(t, s, Config{Timeout: 100 * time.Millisecond})
			mustAcquire(t, d, "a")
			s.setLatency(latency)
			go d.Acquire(t.Context(), "b", time.Hour)
			synctest.Wait()
			go d.Acquire(t.Context(), "c", time.Hour) // Has the next turn, and asks for d too.
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), latency+latency/2)
			defer cancel()
			lock, err := d.Acquire(ctx, "d", time.Hour)
			if granted := err == nil; granted != (latency < 50*time.Millisecond) {
				t.Errorf("latency %v: Acquire = %v", latency, err)
			}
			s.setLatency(0)
			time.Sleep(2 * time.Second)
			if err == nil {
				if ok, err := d.Release(t.Context(), lock); !ok || err != nil {
					t.Errorf("Release = %v, %v", ok, err)
				}
			}
			if s.holder("d") != 0 {
				t.Error("d is still locked")
			}
			mustAcquire(t, d, "d")
		})
	}
}

// TestAdvisoryClaims: a claim that has ended can't end the next one of its name, and what is
// granted on a session that has ended is not held.
func TestAdvisoryClaims(t *testing.T) {
	d, told := newAdvisory(t, &advisoryServer{}, Config{})
	first, _ := d.claim("a", nil)
	if second, err := d.claim("a", nil); second != nil || err != nil {
		t.Fatalf("claim of a taken name = %v, %v", second, err)
	}
	grant := func(session int64) error { return d.hand(session, d.collect(session), []bool{true}, nil, time.Now()) }
	if err := grant(1); err != nil || first.asked {
		t.Fatalf("not granted: %v", err)
	}
	d.sessionEnded(1)
	second, _ := d.claim("a", nil)
	if second == nil {
		t.Fatal("the name is not free after the session's end")
	}
	d.result(first, nil)
	if third, err := d.claim("a", nil); third != nil || err != nil {
		t.Errorf("claim of a taken name = %v, %v", third, err)
	}
	if err := grant(1); err != nil || !second.asked {
		t.Errorf("granted on a session that has ended: %v", err)
	}
	if !slices.Equal(*told, []string{"a"}) {
		t.Errorf("OnLost(%v), want a", *told)
	}
}

// TestAdvisoryCallerLeavesDuringMeet: a request whose context ends while its session is made
// fit for use is not sent.
func TestAdvisoryCallerLeavesDuringMeet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{latency: time.Second}
		d, _ := newAdvisory(t, s, Config{Timeout: time.Minute})
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		if lock, err := d.Acquire(ctx, "m", 0); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrHeld) {
			t.Errorf("Acquire = %v, %v, want DeadlineExceeded", lock, err)
		}
		time.Sleep(time.Minute)
		for _, st := range s.statements() {
			if st.text == d.c.advisory.exchange {
				t.Errorf("%v was sent at %v, after its context", st.args, st.at)
			}
		}
		if _, err := d.Acquire(t.Context(), "m", 0); err != nil {
			t.Errorf("Acquire afterwards = %v", err)
		}
	})
}

// TestAdvisoryFailedReleaseReturns: a release that ends the session returns its error at once.
func TestAdvisoryFailedReleaseReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, told := newAdvisory(t, s, Config{})
		lock := mustAcquire(t, d, "a")
		s.setFault(func(st statement) fault {
			if st.text == d.c.advisory.exchange {
				return fault{err: &pq.Error{Code: "22012"}} // Also of the statement that would settle it.
			}
			return fault{}
		})
		began := time.Now()
		if ok, err := d.Release(t.Context(), lock); ok || err == nil || time.Since(began) > 0 {
			t.Errorf("Release = %v, %v after %v, want an error at once", ok, err, time.Since(began))
		}
		if !slices.Equal(*told, []string{"a"}) {
			t.Errorf("OnLost(%v), want a", *told)
		}
		s.setFault(nil)
		synctest.Wait() // The session is ended in the background.
		mustAcquire(t, d, "a")
	})
}
