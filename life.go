package coord

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// life is the lifetime of a Coord and of each thing that is made from one: a driver, a
// locker, a pinned connection. It admits operations until it ends. Then the contexts of
// those in flight end with the cause [ErrClosed], except a release's.
type life struct {
	parent  *life // nil for a Coord's and a connection's
	ctx     context.Context
	cancel  context.CancelCauseFunc
	closing sync.Once
	busy    sync.WaitGroup // what is in flight; added to by enter, or while something is in flight

	mu    sync.Mutex
	parts map[*life]func() // what was made from it, with the function that closes it
}

// newLife returns a life that ends with parent's, if that is not nil. Its owner closes it by
// calling end.
func newLife(parent *life) *life {
	l := &life{parent: parent, parts: map[*life]func(){}}
	ctx := context.Background()
	if parent != nil {
		ctx = parent.ctx
	}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	return l
}

// own makes close be called when l is closed, unless part has ended before.
func (l *life) own(part *life, close func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		return ErrClosed
	}
	l.parts[part] = close
	return nil
}

// admit begins an operation, unless the life or ctx has ended. The context that it
// returns also ends with the life, unless it is a release's. done must be called at the
// end of the operation.
func (l *life) admit(ctx context.Context) (_ context.Context, done func(), err error) {
	if !l.enter() {
		return nil, nil, ErrClosed
	}
	if ctx.Err() != nil {
		l.leave()
		return nil, nil, ended(ctx)
	}
	if isRelease(ctx) {
		return ctx, l.leave, nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() { cancel(ErrClosed) })
	return ctx, func() { stop(); cancel(nil); l.leave() }, nil
}

// enter counts an operation, for the parents too, and reports whether it may begin.
func (l *life) enter() bool {
	if l.parent != nil && !l.parent.enter() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		if l.parent != nil {
			l.parent.leave()
		}
		return false
	}
	l.busy.Add(1)
	return true
}

func (l *life) leave() {
	l.busy.Done()
	if l.parent != nil {
		l.parent.leave()
	}
}

// end ends the life once: it admits nothing more, cancels what is in flight and calls
// finish. Further calls wait for the first.
func (l *life) end(finish func()) {
	l.closing.Do(func() {
		l.mu.Lock()
		l.cancel(ErrClosed)
		l.mu.Unlock()
		finish()
		if l.parent != nil {
			l.parent.mu.Lock()
			delete(l.parent.parts, l)
			l.parent.mu.Unlock()
		}
	})
}

// endParts closes everything that was made from l, which has ended itself.
func (l *life) endParts() {
	l.mu.Lock()
	closes := slices.Collect(maps.Values(l.parts))
	l.mu.Unlock()
	var wg sync.WaitGroup
	for _, close := range closes {
		wg.Go(close)
	}
	wg.Wait()
}

// over returns [ErrClosed] if the life has ended.
func (l *life) over() error {
	if l.ctx.Err() != nil {
		return ErrClosed
	}
	return nil
}

// releasing marks the context of a release.
type releasing struct{}

func isRelease(ctx context.Context) bool { return ctx.Value(releasing{}) != nil }

// release returns the context of a release. It outlives ctx, unless that is one itself.
func release(ctx context.Context) context.Context {
	if isRelease(ctx) {
		return ctx
	}
	return context.WithValue(context.WithoutCancel(ctx), releasing{}, true)
}

// detach returns the context of a release that ends after [Config.Timeout].
func (c *Coord) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(release(ctx), c.cfg.Timeout)
}

// wait waits for a group until ctx ends.
func wait(ctx context.Context, group *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { group.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
	}
}
