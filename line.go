package coord

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// lines are the callers of this process who have names, or wait for them: one line
// for each name, first come first served. Only who is first in its lines asks the
// database, so that a thousand who wait cost it no more than one.
type lines struct {
	mu sync.Mutex
	of map[string][]*place // by name: who has it or asks for it, then who waits
}

// place is one caller's place in the lines for its names. It has joined them all at
// once, so that no two wait for each other.
type place struct {
	first  chan struct{} // closed when nobody is before it in any line
	behind int           // in how many lines somebody is; under the lines' mu
	lost   bool          // told of a loss while it asks; under the Mutex's mu
}

// join puts the caller in the lines for names, or returns nil if it may not wait
// and is not first.
func (q *lines) join(mayWait bool, names ...string) *place {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !mayWait && slices.ContainsFunc(names, func(name string) bool { return len(q.of[name]) > 0 }) {
		return nil
	}
	if q.of == nil {
		q.of = map[string][]*place{}
	}
	p := &place{first: make(chan struct{})}
	for _, name := range names {
		line := append(q.of[name], p)
		q.of[name] = line
		if len(line) > 1 {
			p.behind++
		}
	}
	if p.behind == 0 {
		close(p.first)
	}
	return p
}

// leave takes p out of the lines for names, where it is still in them, and lets the
// next ones through.
func (q *lines) leave(p *place, names ...string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, name := range names {
		line := q.of[name]
		i := slices.Index(line, p)
		switch {
		case i < 0:
			continue
		case len(line) == 1:
			delete(q.of, name)
			continue
		}
		line = slices.Delete(line, i, i+1)
		q.of[name] = line
		if i > 0 {
			continue
		}
		if line[0].behind--; line[0].behind == 0 {
			close(line[0].first)
		}
	}
}

// head is who has a name or asks for it; nil if nobody does.
func (q *lines) head(name string) *place {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.of[name]) == 0 {
		return nil
	}
	return q.of[name][0]
}

func (p *place) isFirst() bool {
	select {
	case <-p.first:
		return true
	default:
		return false
	}
}

// contend waits for p to be first in its lines, and then tries until what it wants
// is not held any more. doing says what is attempted, busy is the error for who waits
// behind a caller of this process. If ctx ends the wait, see [ErrAcquireTimeout].
func contend[T any](ctx context.Context, doing string, p *place, busy error, least, most time.Duration, try func() (T, error)) (T, error) {
	var none T
	var held error // nil until it is known to be held
	if !p.isFirst() {
		held = busy
	}
	select {
	case <-p.first:
	case <-ctx.Done():
		return none, waited(ctx, doing, held, nil)
	}
	for attempts := 1; ; attempts++ {
		got, err := try()
		switch {
		case err == nil:
			return got, nil
		case !errors.Is(err, ErrHeld):
			return none, waited(ctx, doing, held, err)
		}
		held = err
		select {
		case <-ctx.Done():
			return none, waited(ctx, doing, held, nil)
		case <-time.After(backoff(attempts, least, most)):
		}
	}
}

// waited is the error of a wait that ctx or a failure, which says what failed, has
// ended: see [ErrAcquireTimeout].
func waited(ctx context.Context, doing string, held, failure error) error {
	timeout := errors.Is(ctx.Err(), context.DeadlineExceeded)
	if ctx.Err() != nil {
		failure = wrap(doing, ended(ctx))
	}
	switch {
	case held == nil:
		return failure
	case timeout:
		return fmt.Errorf("%w: %w: %w", failure, ErrAcquireTimeout, held)
	}
	return fmt.Errorf("%w: %w", failure, held)
}
