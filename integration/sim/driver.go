package sim

import (
	"context"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/seed-4c80c132/coord"
)

// sqlError is an error of the server, read as the Postgres dialect reads it.
type sqlError string

func (e sqlError) Error() string    { return "SQLSTATE " + string(e) }
func (e sqlError) SQLState() string { return string(e) }

var (
	errBroken = errors.New("the connection was reset")
	errOver   = errors.New("the world has ended")
)

// dialect is SQLite's statements with Postgres's errors.
type dialect struct{ coord.Dialect }

func (d dialect) Classify(err error) coord.Failure {
	if errors.As(err, new(sqlError)) || errors.Is(err, errBroken) || errors.Is(err, errOver) {
		return coord.Postgres.Classify(err)
	}
	return d.Dialect.Classify(err)
}

// op is what a call of the driver asks for.
type op int

const (
	opDial op = iota
	opPrepare
	opRead
	opWrite
	opCreate
	opBegin
	opCommit
	opRollback
	opPing
)

// conn is a connection of a process. Its calls meet the faults of the plan.
type conn struct {
	p      *process
	id     int
	broken bool
	killed chan struct{} // closed when the server ends it
}

func (p *process) Driver() driver.Driver { return nil }

// Connect dials.
func (p *process) Connect(ctx context.Context) (driver.Conn, error) {
	p.w.connections++
	c := &conn{p: p, id: p.w.connections, killed: make(chan struct{})}
	_, err := c.call(ctx, opDial, "dial", nil, func() (*rows, error) { return nil, nil })
	if err != nil {
		c.broken = true
		return nil, err
	}
	p.conns = append(p.conns, c)
	return c, nil
}

// call is one round trip: the request travels, is served, and the reply travels.
func (c *conn) call(ctx context.Context, op op, name string, args []driver.NamedValue, serve func() (*rows, error)) (*rows, error) {
	w := c.p.w
	if c.broken {
		return nil, driver.ErrBadConn
	}
	o := c.p.outcome(op)
	if op == opCreate && w.hasty {
		o.before += 200 * time.Millisecond
	}
	c.p.flying++
	defer func() { c.p.flying-- }()
	if o.met {
		c.p.hanging++
		defer func() { c.p.hanging-- }()
	}
	defer w.ask(c.p, name, args)()
	w.event(c, "send", name, args, nil, nil)
	if err := c.travel(ctx, o.before, o); err != nil {
		if o.late && op != opDial && w.srv.owner != c {
			go c.arrive(o.before, name, serve)
		}
		return nil, c.fail(name, err, true)
	}
	if o.errBefore != nil {
		return nil, c.fail(name, o.errBefore, o.breaks)
	}
	if err := c.exclude(ctx, op); err != nil {
		return nil, c.fail(name, err, true)
	}
	got, err := serve()
	w.statements++
	w.event(c, "done", name, args, got, err)
	if errTravel := c.travel(ctx, o.after, o); errTravel != nil {
		return nil, c.fail(name, errTravel, true)
	}
	if o.errAfter != nil {
		return nil, c.fail(name, o.errAfter, o.breaks)
	}
	return got, err
}

// fail is a call's failure, which may be the end of its connection.
func (c *conn) fail(name string, err error, breaks bool) error {
	c.p.w.event(c, "fail", name, nil, nil, err)
	if breaks {
		c.end()
	}
	return err
}

// end is the end of the connection. The server rolls back what is open there.
func (c *conn) end() {
	c.broken = true
	if c.p.w.srv.owner == c {
		c.p.w.must(c.p.w.srv.exec("ROLLBACK", nil))
		c.p.w.srv.release()
	}
}

// travel waits for d, unless ctx, the connection or the world ends first. A deaf call is one of a driver that knows
// of none of them but the last.
func (c *conn) travel(ctx context.Context, d time.Duration, o outcome) error {
	done, killed := ctx.Done(), (<-chan struct{})(c.killed)
	if o.deaf {
		done, killed = nil, nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-done:
		return ctx.Err()
	case <-killed:
		return c.p.w.restartError()
	case <-c.p.w.over:
		return errOver
	}
}

// exclude waits until no other connection has a transaction open.
func (c *conn) exclude(ctx context.Context, op op) error {
	s := c.p.w.srv
	for s.owner != nil && s.owner != c && op != opDial && op != opPing && op != opPrepare {
		free := make(chan struct{})
		s.waiting = append(s.waiting, free)
		select {
		case <-free:
		case <-ctx.Done():
			return ctx.Err()
		case <-c.killed:
			return c.p.w.restartError()
		case <-c.p.w.over:
			return errOver
		}
	}
	return nil
}

// arrive serves a request whose sender has left meanwhile.
func (c *conn) arrive(after time.Duration, name string, serve func() (*rows, error)) {
	w := c.p.w
	select {
	case <-time.After(min(after, 5*time.Second)):
	case <-w.over:
		return
	}
	if err := c.exclude(context.Background(), opWrite); err != nil {
		return
	}
	got, err := serve()
	w.statements++
	w.late++
	w.event(c, "late", name, nil, got, err)
}

func (c *conn) IsValid() bool { return !c.broken }

func (c *conn) Close() error {
	if !c.broken {
		c.end()
	}
	c.p.forget(c)
	return nil
}

func (c *conn) Prepare(text string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), text)
}

func (c *conn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	_, err := c.call(ctx, opPrepare, "prepare "+c.p.w.srv.name(text), nil, func() (*rows, error) { return nil, nil })
	if err != nil {
		return nil, err
	}
	return &stmt{c, text}, nil
}

func (c *conn) Ping(ctx context.Context) error {
	_, err := c.call(ctx, opPing, "ping", nil, func() (*rows, error) { return nil, nil })
	return err
}

func (c *conn) run(ctx context.Context, text string, args []driver.NamedValue) (*rows, error) {
	return c.call(ctx, c.p.w.srv.op(text), c.p.w.srv.name(text), args, func() (*rows, error) { return c.p.w.srv.exec(text, args) })
}

func (c *conn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	got, err := c.run(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return got, nil
}

func (c *conn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	got, err := c.run(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return got, nil
}

func (c *conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }

func (c *conn) BeginTx(ctx context.Context, _ driver.TxOptions) (driver.Tx, error) {
	_, err := c.call(ctx, opBegin, "begin", nil, func() (*rows, error) {
		return nil, c.p.w.srv.take(c)
	})
	if err != nil {
		if !c.broken { // It was begun, but the driver says that it was not.
			c.end()
		}
		return nil, err
	}
	return c, nil
}

func (c *conn) Commit() error   { return c.finish(opCommit, "COMMIT") }
func (c *conn) Rollback() error { return c.finish(opRollback, "ROLLBACK") }

func (c *conn) finish(op op, text string) error {
	s := c.p.w.srv
	_, err := c.call(context.Background(), op, text, nil, func() (*rows, error) {
		if s.owner != c {
			return nil, errBroken
		}
		defer s.release()
		return s.exec(text, nil)
	})
	if err != nil && s.owner == c {
		c.end()
	}
	return err
}

// stmt is a prepared statement.
type stmt struct {
	c    *conn
	text string
}

func (s *stmt) Close() error                               { return nil }
func (s *stmt) NumInput() int                              { return -1 }
func (s *stmt) Exec([]driver.Value) (driver.Result, error) { return nil, driver.ErrSkip }
func (s *stmt) Query([]driver.Value) (driver.Rows, error)  { return nil, driver.ErrSkip }
func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.c.ExecContext(ctx, s.text, args)
}
func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.c.QueryContext(ctx, s.text, args)
}
