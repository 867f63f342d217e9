package coord

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
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

// pace is how something is kept alive.
type pace struct {
	every  time.Duration // between renewals
	ttl    time.Duration // counted from the moment before a renewal is sent; 0 does not expire
	margin time.Duration // how long before the deadline the hold ends
}

// keeper is a hold that a batch renews. It ends as lost when its deadline comes before a
// renewal does. It is the only place where coord decides that something is lost by
// its own clock, by a timer that waits for nothing: a renewal may be stuck in the driver.
type keeper struct {
	hold
	pace
	leave func() // its batch
	place int    // among those of its batch, by age

	mu       sync.Mutex
	deadline time.Time // zero if it does not expire
	watchdog *time.Timer
	sent     time.Time // when the last renewal was sent, or the hold began
	failures int       // since the last renewal that came through
}

// stop gives the hold up, and reports whether it had been lost before. A renewal of it
// alone that is in flight is cancelled and waited for.
func (k *keeper) stop() error {
	k.end(nil)
	k.watchdog.Stop()
	k.leave()
	return k.err()
}

// ends returns when the hold is lost unless it is renewed.
func (k *keeper) ends() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.deadline.Add(-k.margin)
}

// isOver reports whether the hold has ended: also if its deadline has passed and the
// watchdog does not know, since the process was suspended.
func (k *keeper) isOver() bool {
	if ends := k.ends(); k.ttl > 0 && !time.Now().Before(ends) {
		k.end(ErrLost)
	}
	return k.ctx.Err() != nil
}

// renewed is called when a renewal has come through that was sent at a time, however long
// ago.
func (k *keeper) renewed(sent time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if deadline := sent.Add(k.ttl); k.ctx.Err() == nil && k.ttl > 0 && deadline.After(k.deadline) {
		k.deadline = deadline
		k.watchdog.Reset(time.Until(deadline) - k.margin)
	}
}

// next returns when the next renewal is due after one that was sent at a time. It counts
// from the send: a slow reply takes nothing from what is left. It is jittered: many holds
// that began together must not renew together for ever.
func (k *keeper) next(sent time.Time, failed bool) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if failed {
		k.failures++
		return time.Now().Add(backoff(k.failures, 10*time.Millisecond, k.every/8))
	}
	k.failures, k.sent = 0, sent
	return k.sent.Add(k.every - rand.N(k.every/10+1))
}

// fate is what a renewal has found of one of the things that it was to renew.
type fate int

const (
	gone    fate = iota // final
	renewed             // for its TTL from the send
	busy                // another transaction has locked it: the next renewal will tell
)

// batch is the renewal loop: it renews all that is due by one statement, however much
// that is. It has one timer and at most one statement in flight. What is renewed are values
// of T, each with a keeper, whose watchdog does not wait for the batch.
type batch[T any] struct {
	most time.Duration // of the patience, which is else a third of the shortest TTL
	all  bool          // what is not due is renewed together with what is
	solo bool          // of one thing: ctx ends after patience, not with the first deadline
	// send renews all by one statement, which is waited for as long as patience. ctx ends with
	// the first deadline: send may have to wait for its turn. It calls answer with the time just
	// before the statement was sent and a fate for each, also when nobody waits any more. An
	// error may pass, except ErrClosed.
	send func(ctx context.Context, patience time.Duration, all []T, answer answer) error

	mu     sync.Mutex
	kept   int // so far
	held   map[*keeper]T
	due    map[*keeper]time.Time
	timer  *time.Timer // nil before the first
	at     time.Time   // when timer fires
	flight *flight     // nil if no statement is in flight
}

// answer is called with what a renewal has found that was sent at a time.
type answer func(renewal)

// renewal is what a renewal has found that was sent at a time.
type renewal struct {
	sent  time.Time
	fates []fate
}

// flight is a statement of a batch.
type flight struct {
	ctx      context.Context
	cancel   context.CancelFunc
	patience time.Duration
	over     chan struct{}
}

func newBatch[T any](most time.Duration, send func(context.Context, time.Duration, []T, answer) error) *batch[T] {
	return &batch[T]{most: most, send: send, held: map[*keeper]T{}, due: map[*keeper]time.Time{}}
}

// keepAlone keeps one thing by a batch of its own. renew reports whether it was renewed;
// false is final.
func keepAlone(h hold, deadline time.Time, p pace, most time.Duration,
	renew func(context.Context) (bool, error)) *keeper {
	b := newBatch(most, func(ctx context.Context, _ time.Duration, _ []struct{}, answer answer) error {
		sent, found := time.Now(), gone
		held, err := renew(ctx)
		if held {
			found = renewed
		}
		if err == nil {
			answer(renewal{sent, []fate{found}})
		}
		return err
	})
	b.solo = true
	return b.keep(struct{}{}, h, deadline, p)
}

// keep renews what, which is held until deadline, the zero time if it does not expire.
func (b *batch[T]) keep(what T, h hold, deadline time.Time, p pace) *keeper {
	k := &keeper{hold: h, pace: p, deadline: deadline}
	k.leave = func() { b.leave(k) }
	k.watchdog = time.AfterFunc(time.Until(deadline)-p.margin, func() { k.end(ErrLost) })
	began := deadline.Add(-p.ttl)
	if deadline.IsZero() {
		k.watchdog.Stop()
		began = time.Now()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kept++
	k.place = b.kept
	b.held[k], b.due[k] = what, k.next(began, false)
	if b.flight == nil && (b.timer == nil || b.due[k].Before(b.at)) {
		b.wakeAt(b.due[k])
	}
	return k
}

// leave takes k out. A statement that is in flight for nobody else is cancelled and waited
// for.
func (b *batch[T]) leave(k *keeper) {
	b.mu.Lock()
	delete(b.held, k)
	delete(b.due, k)
	f := b.flight
	alone := len(b.held) == 0
	if alone && f == nil {
		b.schedule()
	}
	b.mu.Unlock()
	if alone && f != nil {
		f.cancel()
		<-f.over
	}
}

// wakeAt sets the timer. It needs b.mu.
func (b *batch[T]) wakeAt(at time.Time) {
	b.at = at
	if b.timer == nil {
		b.timer = time.AfterFunc(time.Until(at), b.run)
		return
	}
	b.timer.Reset(time.Until(at))
}

// run is one renewal of all that is due. Its statement is abandoned when it takes too long:
// the next may come through before the deadlines. So may this one, late.
func (b *batch[T]) run() {
	keepers, all, f := b.collect()
	if f == nil {
		return
	}
	defer close(f.over)
	defer f.cancel()
	answers := make(chan renewal, 1)
	_, err := await(f.ctx, nil, func() (struct{}, error) {
		return struct{}{}, b.send(f.ctx, f.patience, all, func(r renewal) {
			apply(keepers, r)
			select {
			case answers <- r:
			default:
			}
		})
	}, nil)
	if errors.Is(err, ErrClosed) {
		apply(keepers, renewal{fates: make([]fate, len(keepers))})
	}
	select {
	case r := <-answers:
		b.plan(keepers, &r)
	default:
		b.plan(keepers, nil)
	}
}

// collect returns what is due and starts a flight for it, or returns nil. What is due within
// a tenth of its interval comes too, so that statements grow fewer as holds grow more.
func (b *batch[T]) collect() (keepers []*keeper, all []T, f *flight) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.flight != nil {
		return nil, nil, nil
	}
	f = &flight{patience: b.most, over: make(chan struct{})}
	now, first := time.Now(), time.Time{}
	for _, k := range slices.SortedFunc(maps.Keys(b.held), func(x, y *keeper) int { return x.place - y.place }) { // The same each time, to be read in a log.
		switch what := b.held[k]; {
		case k.isOver():
			delete(b.held, k)
			delete(b.due, k)
		case b.all || b.due[k].Sub(now) <= k.every/10:
			keepers, all = append(keepers, k), append(all, what)
			if k.ttl == 0 {
				continue
			}
			f.patience = min(f.patience, k.ttl/3)
			if ends := k.ends(); first.IsZero() || ends.Before(first) {
				first = ends
			}
		}
	}
	if len(all) == 0 {
		b.schedule()
		return nil, nil, nil
	}
	if b.solo {
		first = now.Add(f.patience)
	}
	f.ctx, f.cancel = context.WithDeadline(context.Background(), first)
	b.flight = f
	return keepers, all, f
}

// plan says when what was renewed, or was not, is due again. r is nil if there was no answer.
func (b *batch[T]) plan(keepers []*keeper, r *renewal) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, k := range keepers {
		if _, held := b.held[k]; !held {
			continue
		}
		if r != nil && r.fates[i] == renewed {
			b.due[k] = k.next(r.sent, false)
		} else {
			b.due[k] = k.next(time.Time{}, true)
		}
	}
	b.flight = nil
	b.schedule()
}

// schedule sets the timer to what is due first. It needs b.mu.
func (b *batch[T]) schedule() {
	var first time.Time
	for _, due := range b.due {
		if first.IsZero() || due.Before(first) {
			first = due
		}
	}
	switch {
	case !first.IsZero():
		b.wakeAt(first)
	case b.timer != nil:
		b.timer.Stop()
		b.timer = nil
	}
}

// apply ends what is gone, and moves the deadlines of what was renewed.
func apply(keepers []*keeper, r renewal) {
	for i, k := range keepers {
		switch r.fates[i] {
		case gone:
			k.end(ErrLost)
		case renewed:
			k.renewed(r.sent)
		}
	}
}
