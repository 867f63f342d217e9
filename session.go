package coord

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
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
	c       *Coord
	turn    chan struct{} // holds one; who has put it there owns what follows
	conn    *pinned       // nil until an operation needs one
	serial  int64         // of the last connection
	closing chan struct{}
	// ended is told the serial of each connection that was discarded or
	// abandoned; nil if nothing is tied to connections.
	ended func(serial int64)
}

// pinned is a borrowed connection with the statements prepared on it.
type pinned struct {
	*sql.Conn
	serial     int64  // the first of a session is 1
	mark       string // what the server knows the session by, once it is known to be ours alone
	unprepared bool
	prepared   map[string]*sql.Stmt
}

// doubt is an error after which the session may hold more than we know of: its
// connection must go.
type doubt struct{ error }

func (d doubt) Unwrap() error { return d.error }

// unsure is the error of a statement that may have been committed all the same:
// its reply was lost.
type unsure struct{ error }

func (u unsure) Unwrap() error { return u.error }

func newSession(c *Coord) *session {
	return &session{c: c, turn: make(chan struct{}, 1), closing: make(chan struct{})}
}

// onSession runs do on the session's connection and returns its result. The errors
// of do are the driver's: what the database has decided is a result. It leaves
// at once if ctx ends before its turn has come and a connection is there; from then
// on it waits for do, whatever becomes of ctx, but no longer than [Config.Timeout]:
// a driver that is stuck longer is abandoned with the connection.
func onSession[T any](ctx context.Context, s *session, do func(context.Context, *pinned) (T, error)) (T, error) {
	var none T
	if err := s.enter(ctx); err != nil {
		return none, err
	}
	defer func() { <-s.turn }()
	conn, err := s.borrow(ctx)
	if err != nil {
		return none, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.c.cfg.Timeout)
	defer cancel()
	s.conn = nil // It stays lost to the session if do does not come back.
	result, err := await(ctx, s.c, func() (T, error) { return do(ctx, conn) }, func(T, error) { conn.discard() })
	switch {
	case errors.Is(err, errAbandoned):
		s.end(conn)
		return none, unsure{err}
	case ctx.Err() != nil || err != nil && s.c.classify(err) == FailureConnection:
		// lib/pq may answer nil on a connection that it is about to kill.
		conn.discard()
		s.end(conn)
		if err != nil {
			return none, unsure{err}
		}
	case s.shared():
		conn.giveBack() // The application needs it too.
	default:
		s.conn = conn
	}
	return result, err
}

// shared tells whether the connection goes back to the pool after each operation.
func (s *session) shared() bool {
	return s.ended == nil && s.c.db.Stats().MaxOpenConnections == 1
}

func (s *session) end(conn *pinned) {
	if s.ended != nil {
		s.ended(conn.serial)
	}
}

// enter waits for this operation's turn.
func (s *session) enter(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ended(ctx)
	case <-s.closing:
		return ErrClosed
	case s.turn <- struct{}{}:
	}
	if ctx.Err() != nil { // Both at once: nothing is sent for a caller who has left.
		<-s.turn
		return ended(ctx)
	}
	return nil
}

// borrow returns the session's connection, a fresh one if there is none.
func (s *session) borrow(ctx context.Context) (*pinned, error) {
	if s.conn != nil {
		return s.conn, nil
	}
	conn, err := await(ctx, s.c, func() (*sql.Conn, error) { return s.c.db.Conn(ctx) }, func(conn *sql.Conn, err error) {
		if err == nil {
			conn.Close()
		}
	})
	if err != nil {
		return nil, fmt.Errorf("borrow a connection: %w", err)
	}
	s.serial++
	unprepared := s.c.cfg.NoPrepare || s.shared() // not kept: preparing would be for nothing
	return &pinned{Conn: conn, serial: s.serial, unprepared: unprepared, prepared: map[string]*sql.Stmt{}}, nil
}

// close turns operations that wait away, lets the running one end, which
// Config.Timeout bounds, and gives the connection back, or discards it if
// something is tied to it. It must be called once.
func (s *session) close() {
	close(s.closing)
	s.turn <- struct{}{} // Never taken out: no operation gets in any more.
	conn := s.conn
	if conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.c.cfg.Timeout)
	defer cancel()
	part := conn.giveBack
	if s.ended != nil {
		part = conn.discard
	}
	bounded(ctx, s.c, part)
	s.end(conn)
}

// query runs a statement that returns rows.
func (p *pinned) query(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if p.unprepared {
		return p.QueryContext(ctx, text, args...)
	}
	stmt, err := p.prepare(ctx, text)
	if err != nil {
		return nil, err
	}
	return stmt.QueryContext(ctx, args...)
}

// exec runs a statement and returns how many rows it changed.
func (p *pinned) exec(ctx context.Context, text string, args ...any) (changed int64, err error) {
	var result sql.Result
	if p.unprepared {
		result, err = p.ExecContext(ctx, text, args...)
	} else {
		var stmt *sql.Stmt
		if stmt, err = p.prepare(ctx, text); err == nil {
			result, err = stmt.ExecContext(ctx, args...)
		}
	}
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (p *pinned) prepare(ctx context.Context, text string) (*sql.Stmt, error) {
	if stmt := p.prepared[text]; stmt != nil {
		return stmt, nil
	}
	stmt, err := p.PrepareContext(ctx, text)
	if err == nil {
		p.prepared[text] = stmt
	}
	return stmt, err
}

// giveBack returns a healthy connection to the pool.
func (p *pinned) giveBack() {
	for _, stmt := range p.prepared {
		stmt.Close() // The pool would not know of them, and the server would keep them.
	}
	p.Close()
}

// discard ends the connection. Close alone would return it to the pool.
func (p *pinned) discard() {
	_ = p.Raw(func(any) error { return driver.ErrBadConn })
	p.Close()
}

// scanRows hands each row to scan and closes rows.
func scanRows(rows *sql.Rows, err error, scan func() error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(); err != nil {
			return err
		}
	}
	return rows.Err()
}

var errAbandoned = errors.New("no answer: the database is out of reach, or a transaction has the row")

// await runs do on a goroutine of its own and returns its result. If ctx ends
// first it returns at once, and late, if not nil, is handed the result whenever do
// comes back: a driver may be stuck for as long as the network likes. Close of c,
// which may be nil, waits a while for that.
func await[T any](ctx context.Context, c *Coord, do func() (T, error), late func(T, error)) (T, error) {
	type outcome struct {
		result T
		err    error
	}
	done := make(chan outcome)
	abandoned := make(chan struct{})
	work := func() {
		result, err := do()
		select {
		case done <- outcome{result, err}:
		case <-abandoned:
			if late != nil {
				late(result, err)
			}
			if c != nil {
				c.late.Done()
			}
		}
	}
	if c == nil {
		go work()
	} else {
		c.crew.run(work)
	}
	select {
	case o := <-done:
		if o.err != nil && ctx.Err() != nil && !errors.Is(o.err, context.Cause(ctx)) { // Not every driver says why it gave up.
			o.err = fmt.Errorf("%w: %w", o.err, ended(ctx))
		}
		return o.result, o.err
	case <-ctx.Done():
		if c != nil {
			c.late.Add(1)
		}
		close(abandoned)
		var none T
		return none, fmt.Errorf("%w: %w", errAbandoned, ended(ctx))
	}
}

// crew runs functions on goroutines of its own and keeps a few for the next: a new
// one's stack would have to grow as deep as a driver goes for every statement, which
// is half of what coord adds to it.
type crew struct {
	mu     sync.Mutex
	closed bool
	idle   []chan func() // of each goroutine that waits for work
}

const maxIdle = 8

func (w *crew) run(work func()) {
	w.mu.Lock()
	last := len(w.idle) - 1
	if last < 0 {
		w.mu.Unlock()
		go w.serve(work)
		return
	}
	next := w.idle[last]
	w.idle = w.idle[:last]
	w.mu.Unlock()
	next <- work
}

func (w *crew) serve(work func()) {
	next := make(chan func(), 1)
	for ok := true; ok; {
		work()
		if !w.rest(next) {
			return
		}
		work, ok = <-next
	}
}

// rest queues for more work, unless there are enough who do.
func (w *crew) rest(next chan func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || len(w.idle) == maxIdle {
		return false
	}
	w.idle = append(w.idle, next)
	return true
}

// close lets the idle go, and the others when they have done their work.
func (w *crew) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for _, next := range w.idle {
		close(next)
	}
	w.idle = nil
}

// bounded waits for do until ctx ends.
func bounded(ctx context.Context, c *Coord, do func()) {
	_, _ = await(ctx, c, func() (struct{}, error) { do(); return struct{}{}, nil }, nil)
}

// ended is the error of a context that has ended: it answers to ctx.Err and to
// the cause, which need not be the same.
func ended(ctx context.Context) error {
	cause := context.Cause(ctx)
	if err := ctx.Err(); err != nil && !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return cause
}

// backoff is how long to wait after so many attempts: from least, doubled each
// time, to most, and jittered so that rivals do not meet again.
func backoff(attempts int, least, most time.Duration) time.Duration {
	d := least
	for ; attempts > 1 && d < most; attempts-- {
		if d = d * 2; d > most || d < 0 {
			d = most
		}
	}
	return d/2 + rand.N(d/2+1)
}
