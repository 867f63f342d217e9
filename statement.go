package coord

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// use is [Coord.begin] of an operation on a table, which is there then.
func (c *Coord) use(ctx context.Context, t *table) (_ context.Context, done func(), err error) {
	ctx, done, err = c.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := c.ensure(ctx, t); err != nil {
		done()
		return nil, nil, err
	}
	return ctx, done, nil
}

// onTable is one operation of a primitive: it runs do on the pinned session, again
// where the database asks for it, once the primitive's table is there. If do may
// have had its way although it failed, lost is called, if not nil.
func onTable[T any](ctx context.Context, c *Coord, t *table, do func(context.Context, *pinned) (T, error), lost func()) (T, error) {
	var none T
	ctx, done, err := c.use(ctx, t)
	if err != nil {
		return none, err
	}
	defer done()
	result, err := retry(ctx, c, func() (T, error) { return onSession(ctx, c.session, do) })
	if lost != nil && errors.As(err, new(unsure)) {
		lost()
	}
	return result, err
}

// onPool is one operation of a primitive that runs on any connection of the pool:
// it runs do, again where the database asks for it, once the primitive's table is
// there, for no longer than [Config.Timeout].
func onPool[T any](ctx context.Context, c *Coord, t *table, do func(context.Context) (T, error)) (T, error) {
	var none T
	ctx, done, err := c.use(ctx, t)
	if err != nil {
		return none, err
	}
	defer done()
	return step(ctx, c, do)
}

// step is one statement on the pool that coord sends on its own account.
func step[T any](ctx context.Context, c *Coord, do func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	return await(ctx, c, func() (T, error) {
		return retry(ctx, c, func() (T, error) { return do(ctx) })
	}, nil)
}

// acquire is onPool for an acquisition, which waits as long as ctx allows and
// returns as soon as that ends. The statement is not cancelled then but let finish,
// for the sake of its connection. What it is granted unseen is freed in the
// background.
func acquire[T any](ctx context.Context, c *Coord, t *table, what string, try func(context.Context) (T, error), free func(context.Context) (bool, error)) (T, error) {
	var none T
	ctx, done, err := c.use(ctx, t)
	if err != nil {
		return none, err
	}
	defer done()
	answer := make(chan error, 1)
	result, err := await(ctx, c, func() (T, error) {
		ctx, cancel := c.outlast(ctx)
		defer cancel()
		result, err := retry(ctx, c, func() (T, error) { return try(ctx) })
		if err != nil && (ctx.Err() != nil || c.classify(err) == FailureConnection) {
			err = unsure{err}
		}
		return result, err
	}, func(_ T, err error) { answer <- err })
	if errors.Is(err, errAbandoned) || errors.As(err, new(unsure)) {
		c.undo(what, answer, free)
	}
	return result, err
}

// outlast is a context that ends [Config.Timeout] after ctx does: what is granted
// after that nobody frees.
func (c *Coord) outlast(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-longer.Done():
		case <-time.After(c.cfg.Timeout):
		}
		cancel()
	})
	return longer, func() { stop(); cancel() }
}

// query runs a statement that returns rows on the pool.
func (c *Coord) query(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if c.cfg.NoPrepare {
		return c.db.QueryContext(ctx, text, args...)
	}
	stmt, err := c.prepare(ctx, text)
	if err != nil {
		return nil, err
	}
	return stmt.QueryContext(ctx, args...)
}

// exec runs a statement on the pool and returns how many rows it changed.
func (c *Coord) exec(ctx context.Context, text string, args ...any) (changed int64, err error) {
	var result sql.Result
	if c.cfg.NoPrepare {
		result, err = c.db.ExecContext(ctx, text, args...)
	} else {
		var stmt *sql.Stmt
		if stmt, err = c.prepare(ctx, text); err == nil {
			result, err = stmt.ExecContext(ctx, args...)
		}
	}
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// prepare returns the prepared statement of the pool for text.
func (c *Coord) prepare(ctx context.Context, text string) (*sql.Stmt, error) {
	if stmt, ok := c.prepared.Load(text); ok {
		return stmt.(*sql.Stmt), nil
	}
	stmt, err := c.db.PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	if known, raced := c.prepared.LoadOrStore(text, stmt); raced {
		stmt.Close()
		return known.(*sql.Stmt), nil
	}
	return stmt, nil
}

// prepareGuards readies statements for callers' transactions, so that they take
// one round trip there: inside, a second connection can't be waited for.
func (c *Coord) prepareGuards(ctx context.Context, texts []string) error {
	if c.cfg.NoPrepare {
		return nil
	}
	for _, text := range texts {
		if _, err := c.prepare(ctx, text); err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
	}
	return nil
}

// guard runs a guard statement in tx and returns [ErrLost] if it finds no row.
func (c *Coord) guard(ctx context.Context, tx DBTX, t *table, text string, args ...any) error {
	switch {
	case t == nil:
		return c.unsupported()
	case c.life.Err() != nil:
		return ErrClosed
	case ctx.Err() != nil:
		return ended(ctx)
	}
	var held bool
	err := c.inTx(ctx, tx, text, args, &held)
	if errors.Is(err, sql.ErrNoRows) {
		return ErrLost
	}
	return err
}

// inTx reads a row in the caller's transaction, by a statement that is prepared if
// it has been prepared on the pool and tx can use that.
func (c *Coord) inTx(ctx context.Context, tx DBTX, text string, args []any, to ...any) error {
	stmt, ready := c.prepared.Load(text)
	on, able := tx.(interface {
		StmtContext(context.Context, *sql.Stmt) *sql.Stmt
	})
	if ready && able {
		err := on.StmtContext(ctx, stmt.(*sql.Stmt)).QueryRowContext(ctx, args...).Scan(to...)
		if err == nil || err.Error() != otherPool {
			return err
		}
	}
	return tx.QueryRowContext(ctx, text, args...).Scan(to...)
}

// otherPool is what database/sql says, before it sends anything, of a statement
// that was prepared on another *sql.DB than the transaction's.
const otherPool = "sql: Tx.Stmt: statement from different database used"

// now is the time parameter of a statement that is about to be sent: nil for the
// database's own clock.
func (c *Coord) now() any {
	if c.cfg.Clock == nil {
		return nil
	}
	return c.cfg.Clock().UnixMicro()
}

// classify is the dialect's word, but for what database/sql itself says of a
// connection: it turns a driver's ErrBadConn on a kept one into ErrConnDone.
func (c *Coord) classify(err error) Failure {
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) || errors.As(err, new(doubt)) {
		return FailureConnection
	}
	return c.dialect.Classify(err)
}

// retry calls do again while the database asks for it. Ten attempts outlast any
// deadlock; more would hide a database that is stuck.
func retry[T any](ctx context.Context, c *Coord, do func() (T, error)) (T, error) {
	for attempt := 1; ; attempt++ {
		result, err := do()
		if err == nil || attempt == 10 || c.classify(err) != FailureRetry {
			return result, err
		}
		select {
		case <-ctx.Done():
			return result, err
		case <-time.After(backoff(attempt, 2*time.Millisecond, 100*time.Millisecond)):
		}
	}
}

// attempt is a new id for an acquisition, which a statement that is sent twice
// carries twice. The upper half is this Coord's, the lower half counts up, so that
// of two acquisitions the later one is known.
func (c *Coord) attempt() int64 { return c.attempts.Add(1) }

// undo frees in the background what an acquisition may have been granted although
// its reply was lost. free reports whether it found the grant; until then it is
// tried again, since the server may still be at work on the acquisition, for no
// longer than [Config.Timeout], for which Close waits too: a statement that was
// cancelled may be committed yet. answer, which may be nil, is the acquisition's error
// if its driver comes back after all. undo must be called while an operation is under
// way.
func (c *Coord) undo(what string, answer <-chan error, free func(context.Context) (bool, error)) {
	c.busy.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Timeout)
		defer cancel()
		final := false
		for wait := 10 * time.Millisecond; ; wait *= 2 {
			select {
			case err := <-answer:
				if err != nil && !errors.As(err, new(unsure)) {
					return // It was refused or failed for sure.
				}
				final, answer = err == nil, nil
			case <-ctx.Done():
			case <-time.After(wait):
			}
			found, err := await(ctx, c, func() (bool, error) { return free(ctx) }, nil)
			if found || final && err == nil || ctx.Err() != nil {
				if err != nil {
					c.cfg.Logger.Warn("coord: could not free what may have been granted unseen: it stays until its TTL", "what", what, "error", err)
				}
				return
			}
		}
	})
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
