package coord

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// session is one connection that is borrowed from the pool once and kept, so that
// what runs on it never waits behind the application for a connection. It runs one
// operation at a time, and fails as a connection: after a failure the connection
// is discarded and the next operation borrows another.
//
// No caller's context reaches the connection: a statement that is cancelled kills
// the connection, and everything that the server has tied to it.
type session struct {
	*life
	c    *Coord
	turn turn // who has it owns what follows

	conn    *pinned     // nil until an operation needs one
	serial  int64       // of the last connection
	begun   atomic.Bool // a first connection was asked for
	suspect bool        // the last connection failed: the pool's idle ones may be dead too
	// ended is told the serial of each connection that was discarded or
	// abandoned; nil if nothing is tied to connections.
	ended func(serial int64)
}

// pinned is a borrowed connection.
type pinned struct {
	conn
	kept   *sql.Conn
	serial int64  // the first of a session is 1
	mark   string // what the server knows the session by, once it is known to be ours alone
	stmts  map[string]*sql.Stmt
}

// doubt is an error after which the session may hold more than we know of: its
// connection must go.
type doubt struct{ error }

func (d doubt) Unwrap() error { return d.error }

// newSession returns a session that ends with owner.
func newSession(c *Coord, owner *life) (*session, error) {
	s := &session{c: c, life: newLife(nil)}
	return s, owner.own(s.life, s.close)
}

// onSession runs do on the session's connection and returns its result. The errors
// of do are the driver's: what the database has decided is a result. It leaves at once if
// ctx ends before its turn has come and a connection is there. From then on it waits for do,
// whatever becomes of ctx. All of it takes [Config.Timeout] at most, unless the operation
// waits for its turn; but do keeps the turn for as long as the patience, and only then is the
// call abandoned with the connection.
func onSession[T any](ctx context.Context, on where, do func(context.Context, *pinned) (T, error)) (T, error) {
	var none T
	s := on.session
	waiting, done, err := s.admit(ctx)
	if err != nil {
		return none, err
	}
	defer done()
	end := time.Now().Add(s.c.cfg.Timeout)
	if !on.waits {
		var leave context.CancelFunc
		waiting, leave = context.WithDeadline(waiting, end)
		defer leave()
	}
	if err := s.turn.take(waiting); err != nil {
		return none, err
	}
	patience := cmp.Or(on.patience, s.c.cfg.Timeout)
	conn, err := s.borrow(waiting, patience)
	if err != nil {
		s.turn.give()
		return none, err
	}
	ctx = context.WithoutCancel(ctx)
	s.hold()
	call := func() (T, error) {
		defer s.release()
		defer s.turn.give()
		return onConn(ctx, s, conn, patience, do)
	}
	if on.waits {
		return call()
	}
	bound, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	return await(bound, s.c, call, nil)
}

// onConn runs do on the session's connection, and keeps the connection if it can.
func onConn[T any](ctx context.Context, s *session, conn *pinned, patience time.Duration,
	do func(context.Context, *pinned) (T, error)) (result T, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.c.cfg.Timeout) // A renewal that comes through late still counts.
	soon, stop := context.WithTimeout(ctx, patience)
	defer stop()
	s.conn = nil // It stays lost to the session if do does not come back.
	result, err = await(soon, s.c, func() (T, error) { return do(ctx, conn) }, func(T, error) { cancel(); s.c.terminate(conn) })
	abandoned := errors.Is(err, errAbandoned)
	if !abandoned {
		defer cancel()
	}
	switch {
	case abandoned, ctx.Err() != nil, errors.As(err, new(panicked)), err != nil && s.c.classify(err) == FailureConnection:
		// lib/pq may answer nil on a connection that it is about to kill.
		if s.suspect = true; !abandoned {
			s.hold()
			go func() { defer s.release(); s.c.terminate(conn) }()
		}
		s.tell(conn)
		if err != nil {
			var none T
			return none, unsure{err}
		}
	case s.shared(): // The application needs it too.
		ctx, cancel := context.WithTimeout(context.Background(), s.c.cfg.Timeout)
		defer cancel()
		bounded(ctx, s.c, conn.giveBack)
	default:
		s.conn = conn
	}
	return result, err
}

// hold makes Close, of the session and of the Coord, wait for release: the caller of an
// operation may leave before its call has ended. It must be called during an operation.
func (s *session) hold()    { s.busy.Add(1); s.c.busy.Add(1) }
func (s *session) release() { s.busy.Done(); s.c.busy.Done() }

// shared reports whether the connection goes back to the pool after each operation: it may
// be kept only if that leaves the pool another one.
func (s *session) shared() bool { return s.ended == nil && !s.c.canPin() }

// canPin reports whether the pool has a connection left for others when one more is kept
// beside those of the advisory drivers.
func (c *Coord) canPin() bool {
	limit := c.db.Stats().MaxOpenConnections
	return limit == 0 || int(c.pins.Load())+2 <= limit
}

func (s *session) tell(conn *pinned) {
	if s.ended != nil {
		s.ended(conn.serial)
	}
}

// turn is a lock that goes to the waiter whose context ends first: on a slow server what has
// little time left must not wait behind what has plenty.
type turn struct {
	mu      sync.Mutex
	taken   bool
	waiting []waiter // the first to end first
}

type waiter struct {
	end   time.Time
	ready chan struct{} // closed when it has the turn
}

// take waits for the turn.
func (t *turn) take(ctx context.Context) error {
	end, limited := ctx.Deadline()
	if !limited {
		end = time.Now().Add(maxTTL)
	}
	w := waiter{end, make(chan struct{})}
	t.mu.Lock()
	if t.waiting = slices.Insert(t.waiting, t.after(end), w); !t.taken {
		t.pass()
	}
	t.mu.Unlock()
	select {
	case <-w.ready:
	case <-ctx.Done():
		if t.leave(w) {
			return ended(ctx)
		}
	}
	if ctx.Err() != nil { // Both at once: nothing is sent for a caller who has left.
		t.give()
		return ended(ctx)
	}
	return nil
}

// after returns the place behind all waiters that end no later.
func (t *turn) after(end time.Time) int {
	i, _ := slices.BinarySearchFunc(t.waiting, end, func(w waiter, end time.Time) int {
		if w.end.After(end) {
			return 1
		}
		return -1
	})
	return i
}

// leave takes a waiter out, and reports whether it was still waiting.
func (t *turn) leave(w waiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := t.after(w.end) - 1; i >= 0 && !t.waiting[i].end.Before(w.end); i-- {
		if t.waiting[i] == w {
			t.waiting = slices.Delete(t.waiting, i, i+1)
			return true
		}
	}
	return false
}

// give gives the turn to the next.
func (t *turn) give() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pass()
}

func (t *turn) pass() {
	if t.taken = len(t.waiting) > 0; t.taken {
		close(t.waiting[0].ready)
		t.waiting = t.waiting[1:]
	}
}

// pin borrows the connection for renewals in the background, if none has been borrowed yet,
// so that the first renewal does not wait for one behind the application. It must be called
// during an operation.
func (c *Coord) pin() {
	if s := c.session; c.canPin() && s.begun.CompareAndSwap(false, true) {
		c.busy.Go(func() {
			_, _ = onSession(c.ctx, where{session: s}, func(context.Context, *pinned) (struct{}, error) { return struct{}{}, nil })
		})
	}
}

// borrow returns the session's connection, a fresh one if there is none.
func (s *session) borrow(ctx context.Context, patience time.Duration) (*pinned, error) {
	if s.conn != nil {
		return s.conn, nil
	}
	s.begun.Store(true)
	kept, err := s.connect(ctx, patience)
	if err != nil {
		return nil, fmt.Errorf("get a connection from the pool: %w", err)
	}
	s.suspect = false
	s.serial++
	p := &pinned{kept: kept, serial: s.serial, stmts: map[string]*sql.Stmt{}}
	p.conn = conn{on: kept, prepared: p.prepare}
	if s.c.cfg.NoPrepare || s.shared() { // What is not kept would be prepared for nothing.
		p.conn = unprepared(kept)
	}
	return p, nil
}

// connect borrows a connection. After a failure the pool's idle ones may be dead, which
// can take each a Timeout to notice: all of them are tried at once, and a new one, and the
// first that answers is taken.
func (s *session) connect(ctx context.Context, patience time.Duration) (*sql.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tries := 1
	if s.suspect {
		tries += s.c.db.Stats().Idle
	}
	ping := s.suspect
	answers := make(chan outcome[*sql.Conn])
	for range tries {
		s.c.busy.Go(func() {
			returnConn := func(conn *sql.Conn, err error) {
				if err == nil {
					conn.Close()
				}
			}
			conn, err := await(ctx, s.c, func() (*sql.Conn, error) { return s.c.connect(ctx, ping) }, returnConn)
			select {
			case answers <- outcome[*sql.Conn]{conn, err}:
			case <-ctx.Done():
				returnConn(conn, err)
			}
		})
	}
	for {
		select {
		case a := <-answers:
			if tries--; a.err == nil || tries == 0 {
				return a.result, a.err
			}
		case <-ctx.Done():
			return nil, ended(ctx)
		}
	}
}

// connect borrows a connection from the pool, and makes sure that it answers if it is to be
// asked.
func (c *Coord) connect(ctx context.Context, ping bool) (*sql.Conn, error) {
	conn, err := c.db.Conn(ctx)
	if err != nil || !ping {
		return conn, err
	}
	if err := conn.PingContext(ctx); err != nil {
		_ = discard(conn) // Its error would repeat that the connection is broken.
		return nil, err
	}
	return conn, nil
}

// close ends the session. It turns away operations that wait, lets the running one finish,
// which takes [Config.Timeout] at most, and gives the connection back, or ends it if
// something is tied to it.
func (s *session) close() {
	s.end(func() {
		_ = s.turn.take(context.Background()) // Never given: no operation gets in any more.
		s.busy.Wait()
		conn := s.conn
		if conn == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.c.cfg.Timeout)
		defer cancel()
		bounded(ctx, s.c, func() {
			if s.ended != nil {
				s.c.terminate(conn)
			} else {
				conn.giveBack()
			}
		})
		s.tell(conn)
	})
}

// terminate ends a connection and the server's session, within [Config.Timeout]. The
// session is told first: to close a connection of a pgxpool only returns it to that.
func (c *Coord) terminate(p *pinned) {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Timeout)
	defer cancel()
	bounded(ctx, c, func() {
		if text := c.format.terminate; text != "" {
			_, _ = p.kept.ExecContext(ctx, text)
		}
		_ = discard(p.kept)
	})
}

func (p *pinned) prepare(ctx context.Context, text string) (*sql.Stmt, error) {
	if stmt := p.stmts[text]; stmt != nil {
		return stmt, nil
	}
	stmt, err := p.kept.PrepareContext(ctx, text)
	if err == nil {
		p.stmts[text] = stmt
	}
	return stmt, err
}

// giveBack returns a healthy connection to the pool.
func (p *pinned) giveBack() {
	for _, stmt := range p.stmts {
		stmt.Close() // The pool would not know of them, and the server would keep them.
	}
	p.kept.Close()
}

// discard ends a connection. Close alone would return it to the pool.
func discard(conn *sql.Conn) error {
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	return conn.Close()
}
