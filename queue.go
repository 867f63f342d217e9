package coord

import (
	"container/heap"
	"container/list"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// queue holds the callers of this process that have names or wait for them. A name is
// busy while a caller holds it or asks the database for it, so that a thousand callers
// that want the same name cost the database no more than one. A caller is let through
// when none of its names is busy, and then all of them are; of two that could be, the one
// that came first. A caller that waits keeps nobody from names that are not busy.
type queue struct {
	mu     sync.Mutex
	of     map[string]*line
	joined int64 // how many places there have been
}

// line is what a queue knows of one name. It exists while somebody has the name or wants
// it. The queue's mu guards it.
type line struct {
	name   string
	busy   *place    // holds the name, or asks for it; nil if nobody does
	places list.List // of *place, in the order of arrival: who has the name or wants it
}

// place is one caller's place in a queue. It is in the lines of all its names until it
// leaves them, so that it keeps its order however often it has to wait.
type place struct {
	order int64         // of arrival
	spots []spot        // in the order of their names; under the queue's mu
	waits bool          // for its turn; under the queue's mu
	turn  chan struct{} // closed when it is let through; replaced only by the caller itself
	asked chan struct{} // closed when it has an answer to its first request, or has left; under the queue's mu
}

// spot is where a place stands in one line, which it can leave at once from there.
type spot struct {
	line *line
	at   *list.Element
}

// join queues the caller for names, which are sorted.
func (q *queue) join(names ...string) *place {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.of == nil {
		q.of = map[string]*line{}
	}
	q.joined++
	p := &place{order: q.joined, spots: make([]spot, len(names))}
	p.waits, p.turn, p.asked = true, make(chan struct{}), make(chan struct{})
	for i, name := range names {
		l := q.of[name]
		if l == nil {
			l = &line{name: name}
			q.of[name] = l
		}
		p.spots[i] = spot{l, l.places.PushBack(p)}
	}
	p.enter()
	return p
}

// enter lets p through if it waits and none of its names is busy with another.
func (p *place) enter() {
	taken := func(s spot) bool { return s.line.busy != nil && s.line.busy != p }
	if !p.waits || slices.ContainsFunc(p.spots, taken) {
		return
	}
	for _, s := range p.spots {
		s.line.busy = p
	}
	p.waits = false
	close(p.turn)
}

// leave takes p out of the lines of names, which are sorted, where it is still in them.
func (q *queue) leave(p *place, names ...string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var freed []*line
	p.spots = slices.DeleteFunc(p.spots, func(s spot) bool {
		if _, found := slices.BinarySearch(names, s.line.name); !found {
			return false
		}
		s.line.places.Remove(s.at)
		if s.line.busy == p {
			s.line.busy = nil
			freed = append(freed, s.line)
		}
		if s.line.places.Len() == 0 {
			delete(q.of, s.line.name)
		}
		return true
	})
	if len(p.spots) == 0 {
		p.answer()
	}
	letThrough(freed)
}

// wait returns a place that has its turn for a name. The error is that of ctx, if it ends
// first.
func (q *queue) wait(ctx context.Context, name string) (*place, error) {
	p := q.join(name)
	if p.hasTurn() {
		return p, nil
	}
	select {
	case <-p.turn:
		return p, nil
	case <-ctx.Done():
		q.leave(p, name)
		return nil, ended(ctx)
	}
}

// try is wait for a caller that is refused, with nil, if another has the name. That another
// has only begun to ask the database for it is no refusal yet.
func (q *queue) try(ctx context.Context, name string) (*place, error) {
	p := q.join(name)
	for !p.hasTurn() {
		q.mu.Lock()
		other := q.holder(name)
		q.mu.Unlock()
		if other == nil {
			continue // It has just left, and p has the turn.
		}
		select {
		case <-p.turn:
		case <-other.asked:
			if q.has(other, name) {
				q.leave(p, name)
				return nil, nil
			}
		case <-ctx.Done():
			q.leave(p, name)
			return nil, ended(ctx)
		}
	}
	return p, nil
}

// has reports whether p has the turn for a name.
func (q *queue) has(p *place, name string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.holder(name) == p
}

// answer notes that p does more than ask for its names: it holds them, or has been refused
// and waits, or has left something behind that has to be settled.
func (q *queue) answer(p *place) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p.answer()
}

func (p *place) answer() {
	select {
	case <-p.asked:
	default:
		close(p.asked)
	}
}

// leaveAfter takes p out of the line of a name when nothing is left of its request, which
// ended with err.
func (q *queue) leaveAfter(err error, p *place, names ...string) {
	if errors.As(err, new(orphan)) {
		q.answer(p)
	}
	whenSettled(err, func() { q.leave(p, names...) })
}

// keepOnly is called after the database has refused p for a name: the others are not busy
// while p pauses. name is empty if the refusal was for none in particular.
func (q *queue) keepOnly(p *place, name string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p.giveUp(name)
}

// again asks for a turn again, for all of p's names. If one of them is busy then p gives
// up what it has kept, since it may have to wait for long, and waits in its old order.
func (q *queue) again(p *place) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p.waits, p.turn = true, make(chan struct{})
	if p.enter(); p.waits {
		p.giveUp("")
	}
}

// giveUp makes p's names but one free for others. p stays in their lines.
func (p *place) giveUp(but string) {
	var freed []*line
	for _, s := range p.spots {
		if s.line.busy == p && s.line.name != but {
			s.line.busy = nil
			freed = append(freed, s.line)
		}
	}
	letThrough(freed)
}

// letThrough lets through the places that wait for lines which are not busy any more.
func letThrough(freed []*line) {
	next := make(arrivals, 0, len(freed))
	for _, l := range freed {
		if first := l.places.Front(); first != nil {
			next = append(next, spot{l, first})
		}
	}
	heap.Init(&next)
	var tried *place // It comes up once for each of its names.
	for len(next) > 0 {
		first := &next[0]
		if p := first.place(); first.line.busy == nil && p != tried {
			p.enter()
			tried = p
		}
		if first.at = first.at.Next(); first.at == nil || first.line.busy != nil {
			heap.Remove(&next, 0)
			continue
		}
		heap.Fix(&next, 0)
	}
}

// arrivals is a heap of spots, the earliest place first.
type arrivals []spot

func (a arrivals) Len() int           { return len(a) }
func (a arrivals) Less(i, j int) bool { return a[i].place().order < a[j].place().order }
func (a arrivals) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *arrivals) Push(s any)        { *a = append(*a, s.(spot)) }
func (a *arrivals) Pop() any {
	last := len(*a) - 1
	s := (*a)[last]
	*a = (*a)[:last]
	return s
}

func (s spot) place() *place { return s.at.Value.(*place) }

// holder returns the place that holds a name or asks for it, nil if none does. It needs q.mu.
func (q *queue) holder(name string) *place {
	if l := q.of[name]; l != nil {
		return l.busy
	}
	return nil
}

// hasTurn reports whether p has its turn.
func (p *place) hasTurn() bool {
	select {
	case <-p.turn:
		return true
	default:
		return false
	}
}

// contend waits for p's turn and then calls try, until what p wants is not held any more.
// If it is, try also returns the name that is held, if it is known. doing says what is
// attempted, busy is the error of a caller that waits behind another of this process. If
// ctx ends the wait, see [ErrAcquireTimeout].
func contend[T any](ctx context.Context, doing string, q *queue, p *place, busy error,
	least, most time.Duration, try func() (T, string, error)) (T, error) {
	var none T
	var held error // nil until it is known to be held
	for attempts := 1; ; attempts++ {
		if held == nil && !p.hasTurn() {
			held = busy
		}
		select {
		case <-p.turn:
		case <-ctx.Done():
			return none, waited(ctx, doing, held, nil)
		}
		got, name, err := try()
		switch {
		case err == nil:
			return got, nil
		case !errors.Is(err, ErrHeld):
			return none, waited(ctx, doing, held, err)
		}
		held = err
		q.answer(p)
		q.keepOnly(p, name)
		if after(ctx, backoff(attempts, least, most)) != nil {
			return none, waited(ctx, doing, held, nil)
		}
		q.again(p)
	}
}

// waitError is the error of a wait that has ended, in one sentence. It is also the errors
// that the sentence tells of.
type waitError struct {
	text string
	errs []error
}

func (e *waitError) Error() string   { return e.text }
func (e *waitError) Unwrap() []error { return e.errs }

// waited returns the error of a wait for what is held, if it is known to be. It was ended
// by ctx, or by failure. See [ErrAcquireTimeout].
func waited(ctx context.Context, doing string, held, failure error) error {
	if ctx.Err() != nil {
		var left orphan // The place in the queue is kept until that is settled.
		errors.As(failure, &left)
		if failure = wrap(doing, ended(ctx)); left.settled != nil {
			failure = orphan{failure, left.settled}
		}
	}
	if held == nil {
		return failure
	}
	e := &waitError{text: "coord: " + doing + ": ", errs: []error{held, failure}}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		e.text += ErrAcquireTimeout.Error() + ": "
		e.errs = append(e.errs, ErrAcquireTimeout)
	}
	e.text += heldText(doing, held) + ": " + bareText(doing, failure)
	return e
}

// heldText is the text of held, which follows that of doing: it does not name again what
// doing names.
func heldText(doing string, held error) string {
	text := strings.TrimPrefix(held.Error(), "coord: ")
	_, object, _ := strings.Cut(doing, " ")
	var of *HeldError
	if errors.As(held, &of) && (of.What == object || strings.HasSuffix(of.What, " "+object)) {
		text = strings.TrimPrefix(text, of.What+": ")
	}
	return text
}

// bareText is the text of err without the beginning that doing has given it.
func bareText(doing string, err error) string {
	text := strings.TrimPrefix(err.Error(), "coord: ")
	return strings.TrimPrefix(text, doing+": ")
}
