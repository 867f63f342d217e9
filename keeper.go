package coord

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
)

// hold is something held: until it is lost, or given up. Its state is a context,
// since that is what the work under it needs.
type hold struct {
	ctx context.Context // ends with the hold, its cause is ErrLost if it was lost
	end context.CancelCauseFunc
}

func newHold() hold {
	ctx, end := context.WithCancelCause(context.Background())
	return hold{ctx, end}
}

// err is nil while the hold lasts and after it was given up, and ErrLost once it
// is lost.
func (h hold) err() error {
	if errors.Is(context.Cause(h.ctx), ErrLost) {
		return ErrLost
	}
	return nil
}

// context is a child of parent that ends with the hold too, for the same cause.
func (h hold) context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	stop := context.AfterFunc(h.ctx, func() { cancel(context.Cause(h.ctx)) })
	return ctx, func() { stop(); cancel(nil) }
}

// keeper renews a hold, and ends it as lost when its deadline comes before a
// renewal does. It is the only place where coord decides that something is lost by
// its own clock.
//
// It is made of two timers. No renewal is waited for: they have goroutines of their
// own, one at a time, so that the watchdog bites on time even while the driver is
// stuck. What is held costs no goroutine in between.
type keeper struct {
	hold
	// renew tells whether what is held was renewed; no is final. An error may
	// pass, but for ErrClosed.
	renew  func(context.Context) (bool, error)
	every  time.Duration // between renewals
	ttl    time.Duration // counted from the moment before a renewal is sent; 0 does not expire
	margin time.Duration // how long before the deadline the hold ends

	mu       sync.Mutex
	deadline time.Time // zero if it does not expire
	watchdog *time.Timer
	next     *time.Timer
	inFlight chan struct{} // closed when the last renewal is over; nil before the first
	failures int           // since the last renewal that came through
}

// keep starts a keeper on something that is held until deadline, the zero time if
// it does not expire.
func keep(deadline time.Time, every, ttl, margin time.Duration, renew func(context.Context) (bool, error)) *keeper {
	k := &keeper{hold: newHold(), renew: renew, every: every, ttl: ttl, margin: margin, deadline: deadline}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.watchdog = time.AfterFunc(time.Until(deadline)-margin, func() { k.end(ErrLost) })
	if deadline.IsZero() {
		k.watchdog.Stop()
	}
	k.next = time.AfterFunc(k.pause(), k.run)
	return k
}

// stop gives the hold up, waits for a renewal in flight, no longer than patience, and
// says whether it had been lost before.
func (k *keeper) stop() error {
	k.end(nil)
	k.mu.Lock()
	k.watchdog.Stop()
	k.next.Stop()
	inFlight := k.inFlight
	k.mu.Unlock()
	if inFlight != nil {
		<-inFlight
	}
	return k.err()
}

// run is one renewal.
func (k *keeper) run() {
	over := make(chan struct{})
	defer close(over)
	k.mu.Lock()
	k.inFlight = over
	late := !k.deadline.IsZero() && time.Until(k.deadline) <= k.margin
	k.mu.Unlock()
	if late { // Both timers were due: the process was suspended.
		k.end(ErrLost)
	}
	if k.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.patience())
	defer cancel()
	sent := time.Now()
	// Given up then: another connection may still come through before the deadline.
	held, err := await(ctx, nil, func() (bool, error) { return k.renew(ctx) }, nil)
	if err == nil && !held || errors.Is(err, ErrClosed) {
		k.end(ErrLost)
		return
	}
	k.plan(sent, err)
}

// patience is the most that one renewal may take: a database that is slow is not out of
// reach, and two more shall fit in.
func (k *keeper) patience() time.Duration { return max(k.every, (k.ttl-k.margin)/3) }

// plan sets the timers after a renewal that was sent at a time, and may have
// failed.
func (k *keeper) plan(sent time.Time, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ctx.Err() != nil {
		return
	}
	k.failures++
	if err == nil {
		k.failures = 0
		k.extend(sent)
	}
	k.next.Reset(k.pause())
}

// renewed tells of a renewal by another hand, which was sent at a time.
func (k *keeper) renewed(sent time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ctx.Err() == nil {
		k.extend(sent)
	}
}

// extend moves the deadline to the TTL after sent. It needs k.mu.
func (k *keeper) extend(sent time.Time) {
	if deadline := sent.Add(k.ttl); k.ttl > 0 && deadline.After(k.deadline) {
		k.deadline = deadline
		k.watchdog.Reset(time.Until(deadline) - k.margin)
	}
}

// pause is how long to wait for the next renewal. It is jittered: many holds that
// began together must not renew together for ever.
func (k *keeper) pause() time.Duration {
	if k.failures > 0 {
		return backoff(k.failures, 10*time.Millisecond, k.every/4)
	}
	return k.every - rand.N(k.every/10+1)
}
