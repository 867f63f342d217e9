package coord

import (
	"errors"
	"testing"
)

// TestLines: who is first in all of its lines is let through, and nobody else.
func TestLines(t *testing.T) {
	var q lines
	check := func(what string, p *place, want bool) {
		t.Helper()
		if got := p.isFirst(); got != want {
			t.Errorf("%s: first = %v, want %v", what, got, want)
		}
	}
	x := q.join(true, "x")
	xy := q.join(true, "x", "y")
	y := q.join(true, "y")
	yz := q.join(true, "y", "z")
	check("x", x, true)
	check("x and y", xy, false)
	q.leave(y, "y") // It was behind xy, which still waits for x.
	check("x and y, when one behind it gave up", xy, false)
	if p := q.join(false, "w", "z"); p != nil {
		t.Error("joined lines without being first, want nil")
	}
	if q.head("w") != nil || q.head("z") != yz {
		t.Errorf("heads = %v and %v, want nobody and the one before", q.head("w"), q.head("z"))
	}
	q.leave(x, "x")
	check("x and y", xy, true)
	q.leave(xy, "x") // It keeps y.
	q.leave(xy, "x")
	check("y and z", yz, false)
	x = q.join(true, "x")
	check("x again", x, true)
	q.leave(xy, "x", "y")
	check("y and z", yz, true)
	q.leave(x, "x")
	q.leave(yz, "y", "z")
	if len(q.of) != 0 {
		t.Errorf("%d lines are left, want none", len(q.of))
	}
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
