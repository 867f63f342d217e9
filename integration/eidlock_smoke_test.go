package integration

import (
	"errors"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

func TestEIDSmoke(t *testing.T) {
	each(t, func(t *testing.T, env *env) {
		c := env.coord(t)
		l, err := c.EIDLocker(coord.EIDConfig{AcquireDeadline: 700 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.AcquireLocks(t.Context(), "a", "1", "2", "3"); err != nil {
			t.Fatal(err)
		}
		if err := l.AssertLocksHeld(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		o, _ := env.coord(t).EIDLocker(coord.EIDConfig{AcquireDeadline: 700 * time.Millisecond})
		err = o.AcquireLocks(t.Context(), "a", "2", "4")
		t.Log(err)
		if !errors.Is(err, coord.ErrHeld) || !errors.Is(err, coord.ErrAcquireTimeout) {
			t.Fatal(err)
		}
		t.Log(l.AcquireLocks(t.Context(), "b", "2"))
		t.Log(l.AcquireLocks(t.Context(), "a", "2", "9"))
		if err := l.AcquireLocks(t.Context(), "a", "1", "3"); err != nil {
			t.Fatal(err)
		}
		if err := o.AcquireLocks(t.Context(), "a", "2", "4"); err != nil {
			t.Fatal(err)
		}
		tx, err := env.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Guard(t.Context(), tx, "a"); err != nil {
			t.Fatal(err)
		}
		tx.Rollback()
		if err := l.AssertLocksHeld(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		l.ReleaseLocks(t.Context(), "a")
		if err := o.AcquireLocks(t.Context(), "z", "1", "3"); err != nil {
			t.Fatal(err)
		}
	})
}
