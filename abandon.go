package coord

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// This file is about calls of the driver that nobody waits for any more. Its rules:
//
//   - A caller waits for the driver until its context ends. Then the call is abandoned: it
//     goes on, on its own goroutine, and its result is given to a function (await).
//   - A statement of an acquisition that has not been sent when its caller leaves is never
//     sent (sending). One that was sent is left to finish, for the sake of its connection,
//     until the time that it has is over.
//   - If an acquisition may have been granted although its caller got an error, the error is
//     an orphan, and the grant is released in the background (takeBack). Until that is
//     settled the name stays busy in this process.
//   - Close waits for all of it, at most for [Config.Timeout] each.

var errAbandoned = errors.New("no answer from the database in time")

// outcome is what a call of the driver returned.
type outcome[T any] struct {
	result T
	err    error
}

// await runs do on another goroutine and returns its result. If ctx ends first, it returns
// at once with errAbandoned, and late, if not nil, is called with the result when do
// returns. Close of c, which may be nil, waits a while for that. A panic of do becomes a
// [panicked] error.
func await[T any](ctx context.Context, c *Coord, do func() (T, error), late func(T, error)) (T, error) {
	done := make(chan outcome[T])
	abandoned := make(chan struct{})
	work := func() {
		var o outcome[T]
		defer func() { // Also if do ends its goroutine.
			select {
			case done <- o:
			case <-abandoned:
				if late != nil {
					late(o.result, o.err)
				}
				if c != nil {
					c.late.Done()
				}
			}
		}()
		protect(do, &o)
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

// panicked is the error of a call that panicked, or ended its goroutine.
type panicked struct{ text string }

func (p panicked) Error() string { return "panic in the driver: " + p.text }

// protect calls do and turns a panic into a [panicked] error.
func protect[T any](do func() (T, error), o *outcome[T]) {
	returned := false
	defer func() {
		if !returned {
			o.err = panicked{fmt.Sprintf("%v\n\n%s", recover(), debug.Stack())}
		}
	}()
	o.result, o.err = do()
	returned = true
}

// rethrow panics in the caller of an operation if the driver panicked in it.
func rethrow(err error) {
	if p := (panicked{}); errors.As(err, &p) {
		panic(p.Error())
	}
}

// bounded waits for do until ctx ends.
func bounded(ctx context.Context, c *Coord, do func()) {
	_, _ = await(ctx, c, func() (struct{}, error) { do(); return struct{}{}, nil }, nil)
}

// sending is an attempt of an acquisition on its way to the database.
type sending struct {
	ctx    context.Context // for the driver: it ends with the caller's until the statement is sent
	caller context.Context
	stop   func()

	unanswered atomic.Bool // a statement was sent of which nothing is known
	granted    atomic.Bool // one was granted, and another is sent after it
}

// open reports whether the database may have granted something.
func (s *sending) open() bool { return s.unanswered.Load() || s.granted.Load() }

// grantedBefore notes that an acquisition which is sent again was granted: whatever becomes
// of the next statement, there may be something to release.
func grantedBefore(ctx context.Context) {
	if send, ok := ctx.Value(sendingKey{}).(*sending); ok {
		send.granted.Store(true)
	}
}

type sendingKey struct{}

// newSending starts an attempt that has a time to finish.
func newSending(caller context.Context, most time.Duration) *sending {
	s := &sending{caller: caller}
	ctx, cancel := context.WithTimeout(context.WithValue(context.WithoutCancel(caller), sendingKey{}, s), most)
	untie := context.AfterFunc(caller, func() {
		if !s.open() {
			cancel()
		}
	})
	s.ctx, s.stop = ctx, func() { untie(); cancel() }
	return s
}

// start is called just before a statement is sent. It refuses if the caller has left.
func (s *sending) start() error {
	was := s.unanswered.Swap(true) // Before the look at the caller, whose end looks at this.
	if s.caller.Err() != nil {
		s.unanswered.Store(was) // database/sql may be about to send it a second time.
		return ended(s.caller)
	}
	return nil
}

// gate is the last argument of an acquisition's statement. database/sql and the drivers
// ask for its value when the connection is there and nothing has been sent.
type gate struct {
	value any
	send  *sending
}

func (g gate) Value() (driver.Value, error) {
	if err := g.send.start(); err != nil {
		return nil, err
	}
	return driver.DefaultParameterConverter.ConvertValue(g.value)
}

// gated puts a gate into the arguments of a statement that belongs to an acquisition.
func gated(ctx context.Context, args []any) []any {
	send, ok := ctx.Value(sendingKey{}).(*sending)
	if !ok || len(args) == 0 {
		return args
	}
	send.unanswered.Store(false) // A statement that was sent before was answered, or there would be no other.
	last := len(args) - 1
	return append(slices.Clone(args[:last]), gate{args[last], send})
}

// unsure is the error of a statement that may have been committed all the same: its reply
// was lost.
type unsure struct{ error }

func (u unsure) Unwrap() error { return u.error }

// orphan is the error of an acquisition that has left something behind: a call of the driver,
// or perhaps a grant, which is being released.
type orphan struct {
	error
	settled <-chan struct{} // closed when nothing is left, as far as can be known
}

func (o orphan) Unwrap() error { return o.error }

// whenSettled calls do when nothing is left of an acquisition that ended with err: at once,
// if err is not an orphan.
func whenSettled(err error, do func()) {
	var o orphan
	if !errors.As(err, &o) {
		do()
		return
	}
	go func() { <-o.settled; do() }() // Ends within a few Timeouts: see takeBack.
}

// whenBack returns a channel that is closed when end tells that the driver has returned from
// an attempt that was never sent, or after [Config.Timeout]. It must be called during an
// operation.
func (c *Coord) whenBack(end <-chan error) <-chan struct{} {
	settled := make(chan struct{})
	c.busy.Go(func() {
		defer close(settled)
		select {
		case <-end:
		case <-time.After(c.cfg.Timeout):
		}
	})
	return settled
}

// takeBack releases in the background what an attempt may have been granted although its
// caller left. end receives the attempt's error when the driver returns. free releases the
// grant and reports whether it found one. It is repeated until it finds one after the
// attempt's end, or the attempt has ended for sure without a grant, for at most
// [Config.Timeout] after that end.
// The channel is closed when free was first answered after the attempt's end, or after
// [Config.Timeout]. takeBack must be called during an operation.
func (c *Coord) takeBack(what string, end <-chan error, free func(context.Context) (bool, error)) <-chan struct{} {
	settled := make(chan struct{})
	settle := sync.OnceFunc(func() { close(settled) })
	late := time.AfterFunc(c.cfg.Timeout, settle)
	c.busy.Go(func() {
		defer func() { late.Stop(); settle() }()
		until, granted := time.Now().Add(c.cfg.Timeout), false
		for attempts := 1; ; attempts++ {
			select {
			case err := <-end:
				if err != nil && !errors.As(err, new(unsure)) && !errors.As(err, new(panicked)) {
					return // It was refused, or failed for sure.
				}
				end, granted, attempts, until = nil, err == nil, 1, time.Now().Add(c.cfg.Timeout)
			case <-time.After(min(backoff(attempts, 20*time.Millisecond, time.Second), time.Until(until))):
			}
			// Its connection may be stuck: it goes on until then, but soon the next tries another.
			ctx, cancel := context.WithDeadline(context.Background(), until)
			soon, stop := context.WithTimeout(context.Background(), min(c.cfg.Timeout/4, time.Until(until)))
			found, err := await(soon, c, func() (bool, error) { defer cancel(); return free(ctx) }, nil)
			stop()
			if end == nil && err == nil {
				if settle(); found || granted {
					return
				}
			}
			if !time.Now().Before(until) {
				if err != nil {
					c.cfg.Logger.Warn("coord: a grant whose reply was lost could not be released: it stays until its TTL", "what", what, "error", err)
				}
				return
			}
		}
	})
	return settled
}

// crew runs functions on goroutines, and keeps a few of these for the next: the stack of a
// new one would have to grow as deep as a driver goes for every statement, which is half of
// what coord adds to it.
type crew struct {
	work   chan func()
	idle   chan struct{} // one for each goroutine that waits for work
	closed chan struct{}
}

func newCrew() crew { return crew{make(chan func()), make(chan struct{}, 8), make(chan struct{})} }

func (w *crew) run(work func()) {
	select {
	case w.work <- work:
	default:
		go w.serve(work)
	}
}

func (w *crew) serve(work func()) {
	for {
		work()
		select {
		case w.idle <- struct{}{}:
		default:
			return // Enough of them wait.
		}
		select {
		case work = <-w.work:
			<-w.idle
		case <-w.closed:
			return
		}
	}
}
