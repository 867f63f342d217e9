package coord

import (
	"context"
	"errors"
	"math/rand/v2"
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
type keeper struct {
	hold
	// renew tells whether what is held was renewed; no is final. An error may
	// pass, but for ErrClosed. It comes back when its context ends, stuck or not.
	renew    func(context.Context) (bool, error)
	every    time.Duration // between renewals, and the most that one may take
	ttl      time.Duration // counted from the moment before a renewal is sent; 0 does not expire
	margin   time.Duration // how long before the deadline the hold ends
	finished chan struct{}
}

// keep starts a keeper on something that is held until deadline, the zero time if
// it does not expire. The keeper ends when its hold does.
func keep(deadline time.Time, every, ttl, margin time.Duration, renew func(context.Context) (bool, error)) *keeper {
	k := &keeper{newHold(), renew, every, ttl, margin, make(chan struct{})}
	go k.run(deadline)
	return k
}

// stop gives the hold up, waits for a renewal in flight, which every bounds, and
// says whether it had been lost before.
func (k *keeper) stop() error {
	k.end(nil)
	<-k.finished
	return k.err()
}

// renewal is how one ended.
type renewal struct {
	sent time.Time
	held bool
	err  error
}

// run waits for no renewal: they have a goroutine of their own, at most one at a
// time, so that the watchdog bites on time even while the driver is stuck.
func (k *keeper) run(deadline time.Time) {
	defer close(k.finished)
	watchdog := time.NewTimer(time.Until(deadline) - k.margin)
	defer watchdog.Stop()
	if deadline.IsZero() {
		watchdog.Stop()
	}
	next := time.NewTimer(k.pause(0))
	defer next.Stop()
	var inFlight chan renewal // nil: none
	for failures := 0; ; {
		select {
		case <-k.ctx.Done():
			if inFlight != nil {
				<-inFlight
			}
			return
		case <-watchdog.C:
			k.end(ErrLost)
		case <-next.C:
			inFlight = make(chan renewal, 1)
			go k.send(inFlight)
		case r := <-inFlight:
			inFlight = nil
			switch {
			case r.err == nil && !r.held, errors.Is(r.err, ErrClosed):
				k.end(ErrLost)
			case r.err == nil:
				failures = 0
				if k.ttl > 0 {
					watchdog.Reset(time.Until(r.sent.Add(k.ttl)) - k.margin)
				}
			default:
				failures++
			}
			next.Reset(k.pause(failures))
		}
	}
}

// send sends one renewal and gives it up after every: another connection may still
// come through before the deadline.
func (k *keeper) send(to chan<- renewal) {
	ctx, cancel := context.WithTimeout(context.Background(), k.every)
	defer cancel()
	sent := time.Now()
	held, err := k.renew(ctx)
	to <- renewal{sent, held, err}
}

// pause is how long to wait for the next renewal after so many failed ones. It is
// jittered: many holds that began together must not renew together for ever.
func (k *keeper) pause(failures int) time.Duration {
	if failures > 0 {
		return backoff(failures, 10*time.Millisecond, k.every/4)
	}
	return k.every - rand.N(k.every/10+1)
}
