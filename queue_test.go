package coord

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestQueue: a place is let through when none of its names is busy, in the order of arrival.
func TestQueue(t *testing.T) {
	var q queue
	var places []*place
	join := func(names ...string) *place {
		p := q.join(names...)
		places = append(places, p)
		return p
	}
	check := func(when string, want ...*place) {
		t.Helper()
		for i, p := range places {
			if got, want := p.hasTurn(), slices.Contains(want, p); got != want {
				t.Errorf("%s: place %d has its turn: %v, want %v", when, i, got, want)
			}
		}
	}
	x := join("x")
	xy, y := join("x", "y"), join("y")
	check("y is free, though one before waits for x too", x, y)
	x2, yz := join("x"), join("y", "z")
	q.leave(x, "x")
	check("x is free", x, y, x2)
	q.leave(y, "y")
	check("y is free", x, y, x2, yz)
	q.leave(yz, "y", "z")
	check("y is free again", x, y, x2, yz)
	q.leave(x2, "x")
	check("x is free again", x, y, x2, yz, xy)
	q.leave(xy, "x") // It keeps y.
	q.leave(xy, "x")
	y2 := join("y")
	check("only y is kept", x, y, x2, yz, xy)
	q.leave(y2, "y") // It gives up.
	q.leave(xy, "x", "y")
	wantNobody(t, &q)
}

// TestQueueFreesAtOnce: of those that wait for any of several names that are freed, the
// earliest comes first, whatever the order of the names.
func TestQueueFreesAtOnce(t *testing.T) {
	for _, ends := range [][]string{{"a", "b"}, {"b", "a"}} {
		var q queue
		ab := q.join("a", "b")
		early := q.join(slices.Sorted(slices.Values([]string{ends[0], "z"}))...)
		late := q.join(slices.Sorted(slices.Values([]string{ends[1], "z"}))...)
		last := q.join(ends[1])
		q.leave(ab, "a", "b")
		if !early.hasTurn() || late.hasTurn() || !last.hasTurn() {
			t.Errorf("%v: turns %v, %v and %v, want true, false and true", ends, early.hasTurn(), late.hasTurn(), last.hasTurn())
		}
		q.leave(last, ends[1])
		q.leave(early, slices.Sorted(slices.Values([]string{ends[0], "z"}))...)
		if !late.hasTurn() {
			t.Errorf("%v: the one in between has no turn", ends)
		}
		q.leave(late, slices.Sorted(slices.Values([]string{ends[1], "z"}))...)
		wantNobody(t, &q)
	}
}

// TestQueueAfterARefusal: the place keeps the name that is held, and no other, until it asks
// again. If it can't have the others then, it gives that one up too, and keeps its order.
func TestQueueAfterARefusal(t *testing.T) {
	var q queue
	p := q.join("x", "y")
	x, y := q.join("x"), q.join("y")
	q.keepOnly(p, "x")
	if x.hasTurn() || !y.hasTurn() {
		t.Errorf("turns for x and y: %v and %v, want false and true", x.hasTurn(), y.hasTurn())
	}
	if q.again(p); p.hasTurn() || !x.hasTurn() {
		t.Errorf("turns while y is busy: %v and of another for x %v, want false and true", p.hasTurn(), x.hasTurn())
	}
	x2 := q.join("x")
	q.leave(y, "y")
	if q.leave(x, "x"); !p.hasTurn() || x2.hasTurn() {
		t.Errorf("turns when both are free: %v and of a later one %v, want true and false", p.hasTurn(), x2.hasTurn())
	}
	q.keepOnly(p, "y")
	if q.leave(x2, "x"); !x2.hasTurn() {
		t.Error("x is not free while its former holder pauses for y")
	}
	if q.again(p); !p.hasTurn() || q.holder("x") != p || q.holder("y") != p {
		t.Error("the place does not get all of its names again")
	}
	q.keepOnly(p, "")
	if q.holder("x") != nil || q.holder("y") != nil {
		t.Error("names are busy after a refusal for none in particular")
	}
	q.leave(p, "x", "y")
	wantNobody(t, &q)
}

// TestTryLockDoesNotWait behind another caller of this process.
func TestTryLockDoesNotWait(t *testing.T) {
	m, err := NewMutex(&memoryDriver{}, MutexConfig{})
	if err != nil {
		t.Fatal(err)
	}
	lock, err := m.TryLock(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.TryLock(t.Context(), "m"); !errors.Is(err, ErrHeld) {
		t.Errorf("TryLock = %v, want ErrHeld", err)
	}
	lock.Unlock(t.Context())
}

// TestLeavingIsCheap: callers that cancel their wait for one name delay nobody who wants another.
func TestLeavingIsCheap(t *testing.T) {
	const n = 200_000
	var q queue
	held, start := q.join("x"), time.Now()
	waiting := make([]*place, n)
	for i := range waiting {
		waiting[i] = q.join("x")
	}
	joined := time.Now()
	for i := range n / 2 { // From both ends.
		q.leave(waiting[i], "x")
		q.leave(waiting[n-1-i], "x")
	}
	if join, leave := joined.Sub(start), time.Since(joined); leave > 20*join {
		t.Errorf("%d joined in %v and left in %v, want about the same", n, join, leave)
	}
	q.leave(held, "x")
	wantNobody(t, &q)
}

// TestHeldByThisProcess: a refusal by another caller of the process says whose it is.
func TestHeldByThisProcess(t *testing.T) { synctest.Test(t, testHeldByThisProcess) }

func testHeldByThisProcess(t *testing.T) {
	c, _ := newMock(t, Config{Owner: "node"})
	table, err := c.TableDriver(DriverConfig{})
	if err != nil {
		t.Fatal(err)
	}
	advisory, err := c.AdvisoryDriver(DriverConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		driver MutexDriver
		owner  string
	}{{table, "node"}, {advisory, "node"}, {&memoryDriver{}, ""}} {
		m, err := NewMutex(test.driver, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		p := m.d.queue().join(m.d.queueName("m"))
		m.d.queue().answer(p)
		_, err = m.TryLock(t.Context(), "m")
		wantHeld(t, err, HeldError{What: "mutex m", Owner: test.owner})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_, err = m.Lock(ctx, "m")
		cancel()
		wantHeld(t, err, HeldError{What: "mutex m", Owner: test.owner})
		wantErrors(t, "Lock", err, ErrHeld, ErrAcquireTimeout, context.DeadlineExceeded)
		m.d.queue().leave(p, m.d.queueName("m"))
		wantNobody(t, m.d.queue())
	}
}

// TestWaitErrorText: the meaning comes first, and nothing is said twice.
func TestWaitErrorText(t *testing.T) {
	until := time.Date(2031, 5, 17, 10, 30, 0, 0, time.UTC)
	mutex := &HeldError{What: "mutex m", Owner: "node", ExpiresAt: until}
	id := &HeldError{What: "id 2", Owner: "node"}
	late, cancel := context.WithTimeoutCause(t.Context(), -1, errors.New("too slow"))
	defer cancel()
	timed, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	failure := errors.New("no such table")
	for _, test := range []struct {
		ctx           context.Context
		doing         string
		held, failure error
		want          string
	}{
		{timed, "lock m", mutex, nil, "coord: lock m: waited too long: held by another: node until 2031-05-17T10:30:00Z: context deadline exceeded"},
		{timed, "lock m", nil, nil, "coord: lock m: context deadline exceeded"},
		{late, "lock m", &HeldError{What: "mutex m"}, nil, "coord: lock m: waited too long: held by another: context deadline exceeded: too slow"},
		{cancelled, "lock m", &HeldError{What: "advisory lock m", Owner: "node"}, nil, "coord: lock m: held by another: node: context canceled"},
		{cancelled, "acquire locks of a", id, nil, "coord: acquire locks of a: id 2: held by another: node: context canceled"},
		{t.Context(), "acquire locks of a", id, wrap("acquire locks of a", failure), "coord: acquire locks of a: id 2: held by another: node: no such table"},
		{t.Context(), "acquire locks of a", nil, wrap("acquire locks of a", failure), "coord: acquire locks of a: no such table"},
		{timed, "acquire locks of a", fmt.Errorf("%w: %w", &HeldError{What: "locks of a"}, failure), nil,
			"coord: acquire locks of a: waited too long: held by another: no such table: context deadline exceeded"},
	} {
		if got := waited(test.ctx, test.doing, test.held, test.failure).Error(); got != test.want {
			t.Errorf("waited = %q, want %q", got, test.want)
		}
	}
}

func wantNobody(t *testing.T, q *queue) {
	t.Helper()
	if n := len(q.of); n != 0 {
		t.Errorf("%d lines are left, want none", n)
	}
}

// TestQueueTry: try is refused while another caller holds the name. While another caller only
// asks for it, try waits for its turn.
func TestQueueTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q queue
		type result struct {
			p   *place
			err error
		}
		try := func(ctx context.Context) chan result {
			results := make(chan result, 1)
			go func() {
				p, err := q.try(ctx, "m")
				results <- result{p, err}
			}()
			synctest.Wait()
			return results
		}
		pending := func(results ...chan result) {
			t.Helper()
			for i, r := range results {
				if len(r) != 0 {
					t.Errorf("try %d has returned: %v", i, <-r)
				}
			}
		}
		first := q.join("m")
		ctx, cancel := context.WithCancel(t.Context())
		a, b, gone := try(t.Context()), try(t.Context()), try(ctx)
		pending(a, b, gone)
		cancel()
		if r := <-gone; r.p != nil || !errors.Is(r.err, context.Canceled) {
			t.Errorf("try that was cancelled = %v", r)
		}
		q.leave(first, "m") // It was refused.
		p := (<-a).p
		if p == nil || !q.has(p, "m") {
			t.Fatalf("try = %v, want the turn of the one that left", p)
		}
		synctest.Wait()
		pending(b)
		q.answer(p)
		if r := <-b; r.p != nil || r.err != nil {
			t.Errorf("try behind a holder = %v, want a refusal", r)
		}
		if r := <-try(t.Context()); r.p != nil || r.err != nil {
			t.Errorf("try of what is held = %v, want a refusal", r)
		}
		q.leave(p, "m")
		if p, err := q.try(t.Context(), "m"); p == nil || err != nil {
			t.Errorf("try of what is free = %v, %v", p, err)
		} else {
			q.leave(p, "m")
		}
		wantNobody(t, &q)
	})
}

// TestQueueAtRandom: whatever places do, one has its turn only if no other has any of its
// names, and none waits whose names are all free.
func TestQueueAtRandom(t *testing.T) {
	names := []string{"a", "b", "c", "d"}
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		var q queue
		wants := map[*place][]string{} // Who is in the queue, and for what.
		var all []*place
		for range 200 {
			switch i := r.IntN(len(all) + 2); {
			case i >= len(all):
				of := slices.DeleteFunc(slices.Clone(names), func(string) bool { return r.IntN(2) == 0 })
				p := q.join(of...)
				all, wants[p] = append(all, p), of
			case all[i].waits || r.IntN(3) == 0:
				q.leave(all[i], wants[all[i]]...)
				delete(wants, all[i])
				all = slices.Delete(all, i, i+1)
			case r.IntN(2) == 0:
				q.keepOnly(all[i], names[r.IntN(len(names))])
			default:
				q.again(all[i])
			}
			for _, p := range all {
				free := !slices.ContainsFunc(wants[p], func(name string) bool { return q.holder(name) != nil })
				if p.waits == p.hasTurn() || p.waits && free {
					t.Fatalf("seed %d: a place for %v waits: %v, has its turn: %v, all free: %v", seed, wants[p], p.waits, p.hasTurn(), free)
				}
				if p.waits && slices.ContainsFunc(wants[p], func(name string) bool { return q.holder(name) == p }) {
					t.Fatalf("seed %d: a place that waits for %v keeps some of them", seed, wants[p])
				}
			}
		}
		for _, p := range all {
			q.leave(p, wants[p]...)
		}
		wantNobody(t, &q)
	}
}
