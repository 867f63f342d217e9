package integration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// TestQueueOfADeadProcess: one id that a dead process has left stops only the sets that want
// it, and not the sets that share other ids with those, or with each other.
func TestQueueOfADeadProcess(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		lockIDs(t, e.locker(t, coord.EIDConfig{TTL: time.Hour}), "tx", "dead")
		l := e.locker(t, coord.EIDConfig{AcquireDeadline: 5 * time.Minute})
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for i := range 5 { // They overlap, and all of them want the dead one's id.
			wg.Go(func() {
				err := l.AcquireLocks(ctx, fmt.Sprint("stuck", i), "dead", fmt.Sprint(i), fmt.Sprint(i+1))
				if !errors.Is(err, coord.ErrAcquireTimeout) {
					t.Errorf("AcquireLocks with the dead id = %v, want ErrAcquireTimeout", err)
				}
			})
		}
		rounds := 0
		for ; ctx.Err() == nil; rounds++ {
			for i := range 5 {
				anchor := fmt.Sprintf("tx%d-%d", rounds, i)
				lockIDs(t, l, anchor, fmt.Sprint(i), fmt.Sprint(i+1))
				l.ReleaseLocks(t.Context(), anchor)
			}
		}
		wg.Wait()
		if rounds < 3 { // One may have begun before they waited, and one may end after it.
			t.Errorf("the others were locked %d times meanwhile, want more than 2", rounds)
		}
		wantLocked(t, e, "dead tx")
	})
}

// TestQueueOfOverlappingSets: every one of many sets that overlap has its ids in the end, also
// while another process takes some of them.
func TestQueueOfOverlappingSets(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		ours := e.locker(t, coord.EIDConfig{AcquireBackoff: time.Millisecond, AcquireMaxBackoff: 10 * time.Millisecond, AcquireDeadline: 5 * time.Minute})
		rival := e.locker(t, coord.EIDConfig{AcquireBackoff: time.Millisecond, AcquireMaxBackoff: 10 * time.Millisecond, AcquireDeadline: 5 * time.Minute})
		holder := make([]sync.Mutex, 6) // Of each id: nobody ever waits for it.
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() {
				l, anchor, first, second := ours, fmt.Sprint("tx", i), i%6, (i+1+i/6%3)%6
				if i%4 == 0 {
					l = rival
				}
				if err := l.AcquireLocks(t.Context(), anchor, fmt.Sprint(first), fmt.Sprint(second)); err != nil {
					t.Error(err)
					return
				}
				defer l.ReleaseLocks(t.Context(), anchor)
				for _, id := range []int{first, second} {
					if !holder[id].TryLock() {
						t.Errorf("id %d is held twice", id)
						continue
					}
					defer holder[id].Unlock()
				}
				assertIDs(t, l, anchor, nil)
			})
		}
		wg.Wait()
		wantLocked(t, e)
	})
}

// TestWaitErrors: the error of a wait says who is in the way, once, in front of the cause.
func TestWaitErrors(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		node := e.coord(t)
		ids, err := node.EIDLocker(coord.EIDConfig{TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		lockIDs(t, ids, "tx", "2")
		table, err := node.TableDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		m := newMutex(t, table, coord.MutexConfig{TTL: time.Hour})
		lock, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		defer lock.Unlock(t.Context())
		_, err = m.TryLock(t.Context(), "m")
		wantWaitError(t, err, "coord: mutex m: held by another: "+node.Owner(), node.Owner())
		otherIDs, other := e.locker(t, coord.EIDConfig{}), newMutex(t, e.mutexDriver(t, "table"), coord.MutexConfig{})
		for _, first := range []error{ // Uses, which take longer.
			otherIDs.AcquireLocks(t.Context(), "first", "first"),
			other.Do(t.Context(), "first", func(context.Context, *coord.Lock) error { return nil }),
		} {
			if first != nil {
				t.Fatal(first)
			}
		}
		var wg sync.WaitGroup
		defer wg.Wait()
		for _, test := range []struct {
			lock   func(context.Context) error
			begins string
		}{
			{func(ctx context.Context) error { _, err := m.Lock(ctx, "m"); return err },
				"coord: lock m: waited too long: held by another: " + node.Owner() + ": "},
			{func(ctx context.Context) error { _, err := other.Lock(ctx, "m"); return err },
				"coord: lock m: waited too long: held by another: " + node.Owner() + " until "},
			{func(ctx context.Context) error { return ids.AcquireLocks(ctx, "b", "1", "2") },
				"coord: acquire locks of b: waited too long: held by another: " + node.Owner() + ": "},
			{func(ctx context.Context) error { return otherIDs.AcquireLocks(ctx, "c", "1", "2") },
				"coord: acquire locks of c: waited too long: id 2: held by another: " + node.Owner() + " until "},
		} {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second) // Enough to be refused once.
				defer cancel()
				err := test.lock(ctx)
				wantWaitError(t, err, test.begins, node.Owner())
				if !errors.Is(err, coord.ErrAcquireTimeout) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v, want ErrAcquireTimeout and the cause", err)
				}
				if !strings.HasSuffix(fmt.Sprint(err), ": context deadline exceeded") {
					t.Errorf("%v, want the cause at the end", err)
				}
			})
		}
	})
}

// wantWaitError checks the text of an ErrHeld, and whom it names.
func wantWaitError(t testing.TB, err error, begins, owner string) {
	t.Helper()
	var held *coord.HeldError
	if !errors.Is(err, coord.ErrHeld) || !errors.As(err, &held) || held.Owner != owner {
		t.Errorf("error = %+v, want ErrHeld by %s", err, owner)
		return
	}
	if text := err.Error(); !strings.HasPrefix(text, begins) || strings.Count(text, "coord:") != 1 {
		t.Errorf("error = %v, want it to begin with %q, and coord: only once", err, begins)
	}
}
