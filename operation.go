package coord

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// conn is what statements run on: the pool, a pinned connection, or the caller's
// transaction.
type conn struct {
	on DBTX
	// prepared returns the prepared statement of a text, or nil to send the text itself.
	prepared func(ctx context.Context, text string) (*sql.Stmt, error)
	// forget drops a prepared statement that the server does not know any more, so that it is
	// prepared again; nil if the connection is replaced instead.
	forget func(text string, stmt *sql.Stmt)
}

// unprepared returns a conn that sends every text itself.
func unprepared(on DBTX) conn {
	return conn{on: on, prepared: func(context.Context, string) (*sql.Stmt, error) { return nil, nil }}
}

// exec runs a statement and returns how many rows it changed.
func (n conn) exec(ctx context.Context, text string, args ...any) (changed int64, err error) {
	result, err := send(ctx, n, text, args, (*sql.Stmt).ExecContext, n.on.ExecContext)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// send sends a statement, prepared if it can be.
func send[T any](ctx context.Context, n conn, text string, args []any,
	prepared func(*sql.Stmt, context.Context, ...any) (T, error), plain func(context.Context, string, ...any) (T, error)) (result T, err error) {
	for again := true; ; again = false {
		stmt, err := n.prepared(ctx, text)
		if err != nil {
			return result, err
		}
		if stmt == nil {
			return plain(ctx, text, gated(ctx, args)...)
		}
		result, err := prepared(stmt, ctx, gated(ctx, args)...)
		switch {
		case err != nil && err.Error() == otherPool:
			return plain(ctx, text, gated(ctx, args)...)
		case again && n.forget != nil && isForgotten(err):
			n.forget(text, stmt)
		default:
			return result, err
		}
	}
}

// otherPool is what database/sql says, before it sends anything, of a statement
// that was prepared on another *sql.DB than the transaction's.
const otherPool = "sql: Tx.Stmt: statement from different database used"

// isForgotten reports whether a prepared statement failed because it has to be prepared
// again: the server does not know it, its tables have changed, or it was closed for such a
// reason by another operation.
func isForgotten(err error) bool {
	state := sqlState(err)
	return state == "26000" || state == "0A000" || err != nil && err.Error() == "sql: statement is closed"
}

// sqlState returns the SQLSTATE of an error of a server, "" if it is none.
func sqlState(err error) string {
	var server interface{ SQLState() string }
	if errors.As(err, &server) {
		return server.SQLState()
	}
	return ""
}

// each calls scan for each row of a statement's result.
func (n conn) each(ctx context.Context, text string, args []any,
	scan func(row func(to ...any) error) error) (err error) {
	rows, err := send(ctx, n, text, args, (*sql.Stmt).QueryContext, n.on.QueryContext)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, rows.Err(), rows.Close()) }()
	for rows.Next() {
		if err := scan(rows.Scan); err != nil {
			return err
		}
	}
	return nil
}

// row reads the row, if there is one, of a statement that returns at most one.
func (n conn) row(ctx context.Context, text string, args []any, to ...any) (found bool, err error) {
	err = n.each(ctx, text, args, func(row func(...any) error) error { found = true; return row(to...) })
	return found, err
}

// pool returns the pool as a conn. Its statements are prepared once.
func (c *Coord) pool() conn { return conn{c.db, c.prepare, c.forget} }

// prepare returns the prepared statement of the pool for text, nil if there is to be none.
func (c *Coord) prepare(ctx context.Context, text string) (*sql.Stmt, error) {
	if c.cfg.NoPrepare {
		return nil, nil
	}
	if stmt, ok := c.statements.Load(text); ok {
		return stmt.(*sql.Stmt), nil
	}
	stmt, err := c.db.PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	if known, raced := c.statements.LoadOrStore(text, stmt); raced {
		stmt.Close()
		return known.(*sql.Stmt), nil
	}
	return stmt, nil
}

func (c *Coord) forget(text string, stmt *sql.Stmt) {
	if c.statements.CompareAndDelete(text, stmt) {
		stmt.Close()
	}
}

// within returns the caller's transaction as a conn. It uses the pool's prepared
// statements where it can.
func (c *Coord) within(tx DBTX) conn {
	return conn{on: tx, prepared: func(ctx context.Context, text string) (*sql.Stmt, error) {
		stmt, ready := c.statements.Load(text)
		on, able := tx.(interface {
			StmtContext(context.Context, *sql.Stmt) *sql.Stmt
		})
		if !ready || !able {
			return nil, nil
		}
		return on.StmtContext(ctx, stmt.(*sql.Stmt)), nil
	}}
}

// where is what an operation runs on; the zero value is the pool.
type where struct {
	session  *session      // a pinned connection
	patience time.Duration // how long the statement is waited for there; 0 is [Config.Timeout]
	waits    bool          // for its turn there, as long as ctx allows
	tx       DBTX          // the caller's transaction
}

// renewing returns where a renewal for ttl runs that is sent by itself.
func (c *Coord) renewing(ttl time.Duration) where {
	return where{session: c.session, patience: min(max(ttl/3, c.cfg.Timeout/5), c.cfg.Timeout)}
}

// run is one operation that needs t: it makes sure that t exists, then runs do.
//
// On the pool and on a pinned connection [Config.Timeout] bounds it, and do is called again
// where the database asks for it, if it returns errLocked, with the connection left to
// others meanwhile, and if the connection of a release breaks. In the caller's transaction do
// is called once and only ctx bounds it: an interruption would end the transaction.
func run[T any](ctx context.Context, c *Coord, on where, t *table, do func(context.Context,
	conn) (T, error)) (result T, err error) {
	if on.tx != nil {
		if err := c.readyIn(ctx, on.tx, t); err != nil {
			return result, err
		}
		return do(ctx, c.within(on.tx))
	}
	ctx, done, err := c.use(ctx, t)
	if err != nil {
		return result, err
	}
	defer done()
	bound, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	for attempts := 1; ; attempts++ {
		if on.session == nil {
			result, err = pooled(bound, c, do)
		} else {
			waiting := bound
			if on.waits {
				waiting = ctx
			}
			result, err = retry(waiting, c, func() (T, error) {
				return onSession(waiting, on, func(ctx context.Context, conn *pinned) (T, error) { return do(ctx, conn.conn) })
			})
		}
		rethrow(err)
		if !c.isLocked(err) && (!isRelease(ctx) || err == nil || c.classify(err) != FailureConnection) {
			return result, err
		}
		if left := after(bound, backoff(attempts, 10*time.Millisecond, 100*time.Millisecond)); left != nil {
			return result, fmt.Errorf("%w: %w", err, left)
		}
	}
}

// pooled runs do on the pool for coord's own account, for [Config.Timeout] at most.
func pooled[T any](ctx context.Context, c *Coord, do func(context.Context, conn) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	return await(ctx, c, func() (T, error) {
		return retry(ctx, c, func() (T, error) { return do(ctx, c.pool()) })
	}, nil)
}

// use admits an operation that needs t, and makes sure that t exists.
func (c *Coord) use(ctx context.Context, t *table) (_ context.Context, done func(), err error) {
	ctx, done, err = c.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := c.ensure(ctx, t, false); err != nil {
		done()
		rethrow(err)
		return nil, nil, err
	}
	return ctx, done, nil
}

// begin admits an operation.
func (c *Coord) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	if c.cfg.Clock != nil && c.cfg.Clock().UnixMicro() < 0 {
		return nil, nil, invalid("Config.Clock is before 1970, which marks what is released")
	}
	return c.admit(ctx)
}

// acquisition is how one kind of thing is acquired, and released again if the caller has left.
type acquisition[T any] struct {
	what  string // for errors, such as "lease jobs/3"
	table *table
	// try sends the acquisition once, under the id of this attempt. Its error is errLocked if
	// nobody is known to hold what is wanted and its row is locked.
	try func(ctx context.Context, on conn, attempt int64) (T, *HeldError, error)
	// undo releases what an attempt was granted, and reports whether it found that.
	undo func(ctx context.Context, on conn, attempt int64) (bool, error)
	// now makes a locked row a HeldError, instead of waiting for it as long as ctx allows.
	now     bool
	renewed bool // what is granted will be renewed
}

// errLocked is the result of an acquisition or a renewal that found its row locked by
// another transaction, such as one with an open Guard: nobody is known to hold it, and the
// caller has to ask again.
var errLocked = errors.New("another transaction has locked the row")

// isLocked reports whether err says that a row is locked: also that of a statement which
// waited for a rival's insert and undid itself.
func (c *Coord) isLocked(err error) bool {
	return errors.Is(err, errLocked) || err != nil && !errors.As(err, new(orphan)) && c.classify(err) == FailureContended
}

// acquire runs an acquisition on the pool. It asks again, with pauses, while the row is
// locked by another transaction, until ctx ends: see [ErrAcquireTimeout]. Each attempt takes
// at most [Config.Timeout]. If the whole table is locked, so that attempts get no answer
// though the database can be reached, there is one for each Timeout.
//
// It returns soon after ctx has ended. If the acquisition may have been granted all the
// same, its error is an [orphan]. The caller has a place in the queue for the name, and keeps
// it until that is settled.
func acquire[T any](ctx context.Context, c *Coord, a acquisition[T]) (got T, held *HeldError, err error) {
	ctx, done, err := c.use(ctx, a.table)
	if err != nil {
		return got, nil, err
	}
	defer done()
	if a.renewed {
		c.pin()
	}
	for attempts := 1; ; attempts++ {
		var slow bool
		got, held, slow, err = a.once(ctx, c)
		switch locked := c.isLocked(err); {
		case locked && a.now:
			return got, nil, lockedBy(a.what, err)
		case locked:
			if after(ctx, backoff(attempts, 10*time.Millisecond, 100*time.Millisecond)) != nil {
				return got, nil, waited(ctx, "acquire "+a.what, lockedBy(a.what, err), nil)
			}
		case !slow || !c.reachable(ctx):
			rethrow(err)
			return got, held, err
		default:
			settled := make(chan struct{})
			whenSettled(err, func() { close(settled) })
			select {
			case <-settled:
			case <-ctx.Done():
				return got, nil, err
			}
		}
	}
}

// lockedBy is the refusal of a locked row, with the database's words on it, if any.
func lockedBy(what string, err error) error {
	if errors.Is(err, errLocked) {
		return &HeldError{What: what}
	}
	return fmt.Errorf("%w: %w", &HeldError{What: what}, err)
}

// acquireInTurn is acquire for a caller that has no place in the queue yet.
func acquireInTurn[T any](ctx context.Context, c *Coord, a acquisition[T]) (got T, held *HeldError, err error) {
	if a.table == nil {
		return got, nil, c.unsupported()
	}
	ctx, done, err := c.begin(ctx)
	if err != nil {
		return got, nil, err
	}
	defer done()
	busy := &HeldError{What: a.what, Owner: c.Owner()}
	join, name := c.queue.wait, a.table.record+" "+a.what
	if a.now {
		join = c.queue.try
	}
	p, err := join(ctx, name)
	switch {
	case err != nil:
		return got, nil, waited(ctx, "acquire "+a.what, busy, nil)
	case p == nil:
		return got, busy, nil
	}
	defer func() { c.queue.leaveAfter(err, p, name) }()
	return acquire(ctx, c, a)
}

// once is one attempt. slow reports that it was cancelled because it took too long, and that
// the driver came back.
func (a acquisition[T]) once(ctx context.Context, c *Coord) (_ T, _ *HeldError, slow bool, err error) {
	bound, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	sending := newSending(bound, c.cfg.Timeout-c.cfg.Timeout/16) // So that the driver can still answer in time.
	attempt := c.attempts.Add(1)
	type answer struct {
		got  T
		held *HeldError
	}
	end := make(chan error, 1)
	got, err := await(bound, c, func() (answer, error) {
		defer sending.stop()
		got, err := retry(sending.ctx, c, func() (answer, error) {
			got, held, err := a.try(sending.ctx, c.pool(), attempt)
			if err != nil && c.classify(err) == FailureRetry {
				sending.unanswered.Store(false) // Nothing was done.
			}
			return answer{got, held}, err
		})
		if err == nil {
			return got, nil
		}
		lost := !errors.Is(err, errLocked) && sending.unanswered.Load() && (sending.ctx.Err() != nil || c.classify(err) == FailureConnection)
		if lost || sending.granted.Load() {
			err = unsure{err}
		}
		return got, err
	}, func(_ answer, err error) { end <- err })
	abandoned := errors.Is(err, errAbandoned)
	slow = err != nil && !abandoned && ctx.Err() == nil && errors.Is(sending.ctx.Err(), context.DeadlineExceeded)
	switch {
	case abandoned && !sending.open(): // It will never be sent.
		return got.got, nil, slow, orphan{err, c.whenBack(end)}
	case !sending.open(), !abandoned && !errors.As(err, new(unsure)) && !errors.As(err, new(panicked)):
		return got.got, got.held, slow, err
	case !abandoned:
		end <- unsure{err}
	}
	return got.got, nil, slow, orphan{err, c.takeBack(a.what, end, func(ctx context.Context) (bool, error) {
		return a.undo(ctx, c.pool(), attempt)
	})}
}

// reachable reports whether the database answers on some connection of the pool.
func (c *Coord) reachable(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout/4)
	defer cancel()
	_, err := await(ctx, c, func() (struct{}, error) { return struct{}{}, c.db.PingContext(ctx) }, nil)
	return err == nil
}

// granted returns the result of an acquisition to its caller: ErrHeld, if it was refused.
func granted[T any](doing string, got T, held *HeldError, err error) (T, error) {
	var none T
	switch {
	case errors.Is(err, ErrHeld): // It says what was attempted.
		return none, err
	case err != nil:
		return none, wrap(doing, err)
	case held != nil:
		return none, held
	}
	return got, nil
}

// guard runs a guard statement in tx and returns [ErrLost] if it finds no row.
func (c *Coord) guard(ctx context.Context, tx DBTX, t *table, text string, args ...any) error {
	switch {
	case t == nil:
		return c.unsupported()
	case c.ctx.Err() != nil:
		return ErrClosed
	case ctx.Err() != nil:
		return ended(ctx)
	}
	var held bool
	found, err := c.within(tx).row(ctx, text, args, &held)
	if err == nil && !found {
		return ErrLost
	}
	return err
}

// retry calls do again while the database asks for it. Ten attempts outlast any
// deadlock; more would hide a database that is stuck.
func retry[T any](ctx context.Context, c *Coord, do func() (T, error)) (T, error) {
	for attempt := 1; ; attempt++ {
		result, err := do()
		if err == nil || attempt == 10 || c.classify(err) != FailureRetry {
			return result, err
		}
		if after(ctx, backoff(attempt, 2*time.Millisecond, 100*time.Millisecond)) != nil {
			return result, err
		}
	}
}

// classify is the dialect's word on an error of the driver. Errors of database/sql itself
// are of the connection: it turns a driver's ErrBadConn on a kept one into ErrConnDone.
func (c *Coord) classify(err error) Failure {
	switch {
	case errors.Is(err, errLocked) || errors.As(err, new(panicked)):
		return FailureOther
	case errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) || errors.As(err, new(doubt)) || errors.Is(err, errAbandoned):
		return FailureConnection
	}
	return c.dialect.Classify(err)
}

// now is the time parameter of a statement: null for the database's own clock. With
// [Config.Clock] it is read when the driver asks for it, just before the send, and not
// before a connection was waited for.
func (c *Coord) now() any {
	if c.cfg.Clock == nil {
		return nil
	}
	return clockNow(c.cfg.Clock)
}

type clockNow func() time.Time

func (now clockNow) Value() (driver.Value, error) { return now().UnixMicro(), nil }

// ended is the error of a context that has ended: it answers to ctx.Err and to
// the cause, which need not be the same.
func ended(ctx context.Context) error {
	cause := context.Cause(ctx)
	if err := ctx.Err(); err != nil && !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return cause
}

// after waits for d, or until ctx ends, whose error it returns.
func after(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ended(ctx)
	case <-time.After(d):
		return nil
	}
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

// micros is a duration as it is sent, rounded up: a holder trusts what it asked for.
func micros(d time.Duration) int64 {
	if d%time.Microsecond > 0 {
		return d.Microseconds() + 1
	}
	return d.Microseconds()
}

// jsonList is a list as it is sent.
func jsonList[T any](list []T) string {
	text, err := json.Marshal(list)
	if err != nil {
		panic(err) // strings and integers do not fail
	}
	return string(text)
}
