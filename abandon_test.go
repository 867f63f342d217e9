package coord

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
)

// TestUnlockPanics: after a panic of the driver in Unlock the name is free in this process, and
// a second Unlock is an error.
func TestUnlockPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{}
		c := newCoord(t, f, Config{})
		d, _ := c.TableDriver(DriverConfig{})
		panics := true
		f.answer = func(s statement) (driver.Rows, error) {
			switch {
			case s.text == d.acquire:
				return &oneRow{true, "o", int64(1), int64(0)}, nil
			case s.text == d.release && panics:
				panics = false
				panic("oops")
			}
			return noRows{}, nil
		}
		m, _ := NewMutex(d, MutexConfig{TTL: time.Second})
		l, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			l.Unlock(t.Context())
		}()
		time.Sleep(time.Hour)
		if err := l.Unlock(t.Context()); err == nil {
			t.Error("the second Unlock = nil, want an error")
		}
		if _, err := m.TryLock(t.Context(), "m"); err != nil {
			t.Errorf("an hour later TryLock = %v", err)
		}
	})
}

// TestRunDriverPanics: after a panic of the driver in RunPartitions nothing goes on.
func TestRunDriverPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		var armed bool
		f.before = func(name string, _ []any) error {
			if armed && name == "list" {
				armed = false
				panic("oops in the driver")
			}
			return nil
		}
		r := f.begin(t, 2, nil)
		time.Sleep(5 * time.Second)
		f.set(func() { armed = true })
		<-r.finished
		if !strings.Contains(fmt.Sprint(r.panicked), "oops") {
			t.Errorf("RunPartitions panicked with %v, want what the driver said", r.panicked)
		}
		before := f.lease(0).expires
		time.Sleep(10 * time.Minute)
		if len(r.ends(0)) != 1 || len(r.ends(1)) != 1 {
			t.Errorf("%d and %d fns have ended, want both", len(r.ends(0)), len(r.ends(1)))
		}
		if l := f.lease(0); l.expires.After(time.Now()) {
			t.Errorf("ten minutes after RunPartitions has panicked the lease is held by %s, renewed %v on", l.owner, l.expires.Sub(before))
		}
		r.cancel()
		time.Sleep(10 * time.Minute)
		if l := f.lease(0); l.expires.After(time.Now()) {
			t.Errorf("also ten minutes after the end of ctx")
		}
		f.c.Close()
	})
}

// TestSlowGrantIsUndone: a grant that came so late that it was asked for again is released if
// the second statement is not granted.
func TestSlowGrantIsUndone(t *testing.T) {
	for _, how := range []string{"ctx ends", "second fails", "second refused by the server"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeDriver{}
				c := newCoord(t, f, Config{})
				d, _ := c.TableDriver(DriverConfig{})
				n := 0
				f.answer = func(s statement) (driver.Rows, error) {
					if s.text == d.acquire {
						if n++; n == 1 {
							time.Sleep(3 * time.Second)
							return &oneRow{true, "o", int64(1), int64(0)}, nil
						}
						return nil, &pq.Error{Code: "42501"}
					}
					return changed{rows: 0}, nil
				}
				ctx := t.Context()
				if how == "ctx ends" {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, 2*time.Second)
					defer cancel()
				}
				start := time.Now()
				_, err := d.Acquire(ctx, "m", 5*time.Second)
				if err == nil {
					t.Error("Acquire = nil, want an error")
				}
				time.Sleep(time.Minute)
				undone := false
				for _, s := range f.statements() {
					undone = undone || s.text == d.undo && s.at.Sub(start) >= 3*time.Second
				}
				if !undone {
					t.Error("the grant, which was made at 3 s, was never undone")
				}
			})
		})
	}
}

// TestCloseEndsWaiters: Close of a driver ends calls that wait behind another driver's holder.
func TestCloseEndsWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{}
		c := newCoord(t, f, Config{})
		d1, _ := c.TableDriver(DriverConfig{})
		d2, _ := c.TableDriver(DriverConfig{})
		f.answer = func(s statement) (driver.Rows, error) {
			switch s.text {
			case d1.acquire:
				return &oneRow{true, "o", int64(1), int64(0)}, nil
			case d1.renew:
				return &listRows{rows: [][]driver.Value{{"m", int64(1), true}}}, nil
			}
			return noRows{}, nil
		}
		m1, _ := NewMutex(d1, MutexConfig{})
		m2, _ := NewMutex(d2, MutexConfig{})
		l, err := m1.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		done := make(chan error)
		go func() { _, err := m2.Lock(ctx, "m"); done <- err }()
		synctest.Wait()
		start := time.Now()
		d2.Close()
		err = <-done
		if !errors.Is(err, ErrClosed) {
			t.Errorf("Lock on a closed driver = %v, after %v", err, time.Since(start))
		}
		l.Unlock(t.Context())
	})
}

// TestWaitBehindACaller: a deadline that ends the wait behind a caller of this process counts as
// held.
func TestWaitBehindACaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{}
		c := newCoord(t, f, Config{})
		d, _ := c.TableDriver(DriverConfig{})
		f.answer = func(s statement) (driver.Rows, error) {
			if s.text == d.acquire {
				time.Sleep(time.Second)
				return &oneRow{true, "o", int64(1), int64(0)}, nil
			}
			return noRows{}, nil
		}
		m, _ := NewMutex(d, MutexConfig{})
		go m.Lock(t.Context(), "m")
		synctest.Wait()
		for name, do := range map[string]func(context.Context) error{
			"TryLock": func(ctx context.Context) error { _, err := m.TryLock(ctx, "m"); return err },
			"Acquire": func(ctx context.Context) error { _, err := d.Acquire(ctx, "m", time.Minute); return err },
			"Lock":    func(ctx context.Context) error { _, err := m.Lock(ctx, "m"); return err },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			err := do(ctx)
			cancel()
			if !errors.Is(err, ErrHeld) || !errors.Is(err, ErrAcquireTimeout) {
				t.Errorf("%s = %v", name, err)
			}
		}
		time.Sleep(time.Minute)
	})
}

// TestDriverEndsItsGoroutine: the caller gets a panic, and does not wait for ever.
func TestDriverEndsItsGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{answer: func(statement) (driver.Rows, error) { runtimeGoexit(); return nil, nil }}
		c := newCoord(t, f, Config{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			c.Purge(ctx, time.Minute)
		}()
		if time.Since(start) > time.Minute {
			t.Errorf("Purge took %v", time.Since(start))
		}
	})
}

// TestLatePanicIsUndone: the driver may panic after the grant, when its caller has left.
func TestLatePanicIsUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{}
		c := newCoord(t, f, Config{})
		d, _ := c.TableDriver(DriverConfig{})
		start := time.Now()
		f.answer = func(s statement) (driver.Rows, error) {
			if s.text == d.acquire {
				time.Sleep(time.Second)
				panic("after the grant")
			}
			return changed{rows: 0}, nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		d.Acquire(ctx, "m", time.Hour)
		time.Sleep(time.Minute)
		after := 0
		for _, s := range f.statements() {
			if s.text == d.undo && s.at.Sub(start) >= time.Second {
				after++
			}
		}
		if after == 0 {
			t.Error("nothing was undone after the driver had come back")
		}
	})
}

// TestAdvisoryRefusalNamesUs: a lock that this driver has is refused in its own name.
func TestAdvisoryRefusalNamesUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &advisoryServer{}
		d, _ := newAdvisory(t, s, Config{Owner: "me"})
		mustAcquire(t, d, "m")
		_, err := d.Acquire(t.Context(), "m", time.Minute)
		var held *HeldError
		if !errors.As(err, &held) || held.Owner != "me" {
			t.Errorf("refused by %v", err)
		}
	})
}

// TestCancelledWaitersAreNotSentAtOnce: callers whose contexts end while their statement is in
// flight keep their place, so that others do not send one beside it.
func TestCancelledWaitersAreNotSentAtOnce(t *testing.T) {
	ops := map[string]func(ctx context.Context, c *Coord) error{
		"Lock": func(ctx context.Context, c *Coord) error {
			d, _ := c.TableDriver(DriverConfig{})
			m, _ := NewMutex(d, MutexConfig{})
			_, err := m.Lock(ctx, "m")
			return err
		},
		"TryLock": func(ctx context.Context, c *Coord) error {
			d, _ := c.TableDriver(DriverConfig{})
			m, _ := NewMutex(d, MutexConfig{})
			_, err := m.TryLock(ctx, "m")
			return err
		},
		"AcquireLocks": func(ctx context.Context, c *Coord) error {
			l, _ := c.EIDLocker(EIDConfig{})
			return l.AcquireLocks(ctx, "a", "1", "2")
		},
		"Acquire": func(ctx context.Context, c *Coord) error {
			_, err := c.Leases().Acquire(ctx, "jobs", 3, "me", time.Minute)
			return err
		},
		"Reserve": func(ctx context.Context, c *Coord) error {
			_, err := c.Reservations().Reserve(ctx, ReservationScope{Context: "a", Aggregate: "b"}, "key", AggregateRef{ID: "o"}, "hold", time.Minute)
			return err
		},
	}
	for name, op := range ops {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeDriver{}
				c := newCoord(t, f, Config{})
				var inFlight, most atomic.Int64
				f.answer = func(s statement) (driver.Rows, error) {
					most.Store(max(most.Load(), inFlight.Add(1)))
					defer inFlight.Add(-1)
					time.Sleep(time.Second)
					return noRows{}, nil
				}
				for range 40 {
					ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
					if err := op(ctx, c); err == nil {
						t.Error("granted by a database that grants nothing")
					}
					cancel()
				}
				if n := most.Load(); n == 0 || n > 2 { // The second takes back the first.
					t.Errorf("%d statements were in flight at once, want one and the one that takes it back", n)
				}
			})
		})
	}
}

// TestReleasesAreRepeated: a release whose connection breaks is sent again, and reports what the
// statement did that was answered.
func TestReleasesAreRepeated(t *testing.T) {
	scope, owner := ReservationScope{Context: "a", Aggregate: "b"}, AggregateRef{ID: "o"}
	for name, release := range map[string]func(context.Context, *Coord) (bool, error){
		"lease":  func(ctx context.Context, c *Coord) (bool, error) { return c.Leases().Release(ctx, "jobs", 3, "o") },
		"member": func(ctx context.Context, c *Coord) (bool, error) { return true, c.Members().Leave(ctx, "web", "o") },
		"mutex": func(ctx context.Context, c *Coord) (bool, error) {
			d, _ := c.TableDriver(DriverConfig{})
			return d.Release(ctx, DriverLock{Name: "m", Fence: 7})
		},
		"hold": func(ctx context.Context, c *Coord) (bool, error) {
			return c.Reservations().Abandon(ctx, scope, "key", owner, "hold")
		},
		"reservation": func(ctx context.Context, c *Coord) (bool, error) {
			return c.Reservations().Release(ctx, scope, "key", owner, 7)
		},
	} {
		for _, failure := range []error{io.ErrUnexpectedEOF, &pq.Error{Code: "57P01"}, &pq.Error{Code: "25006"}, &pq.Error{Code: "53300"}} {
			t.Run(fmt.Sprintf("%s, %v", name, failure), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := &fakeDriver{}
					c := newCoord(t, f, Config{})
					typ, _ := c.reservations.of(scope.Context, scope.Aggregate)
					typ.table.ready.Store(true)
					heals := time.Now().Add(3 * time.Second)
					f.answer = func(statement) (driver.Rows, error) {
						if time.Now().Before(heals) {
							return nil, failure
						}
						return &listRows{rows: [][]driver.Value{{true}}}, nil
					}
					ctx, cancel := context.WithCancel(t.Context())
					cancel()
					if ok, err := release(ctx, c); !ok || err != nil {
						t.Errorf("released %v, %v, want true once the database answers", ok, err)
					}
					heals = time.Now().Add(time.Hour)
					began := time.Now()
					if ok, err := release(ctx, c); err == nil || time.Since(began) > 5*time.Second {
						t.Errorf("released %v, %v after %v, want an error after Timeout", ok, err, time.Since(began))
					}
				})
			})
		}
	}
}

// TestPlaceIsKeptUntilTheReply: an undo that finds the grant before its reply has come ends the
// caller's place in the queue no earlier than the reply: the driver may be about to send the
// statement again.
func TestPlaceIsKeptUntilTheReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{}
		c := newCoord(t, f, Config{})
		var sent []time.Time
		f.answer = func(s statement) (driver.Rows, error) {
			if s.text != c.leases.acquire {
				return changed{rows: 1}, nil
			}
			sent = append(sent, time.Now())
			time.Sleep(time.Second)
			return &oneRow{true, "me", int64(1), time.Now().Add(time.Hour).UnixMicro()}, nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := c.Leases().Acquire(ctx, "jobs", 3, "me", time.Hour); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire = %v, want DeadlineExceeded", err)
		}
		if _, err := c.Leases().Acquire(t.Context(), "jobs", 3, "me", time.Hour); err != nil {
			t.Errorf("Acquire behind it = %v", err)
		}
		if len(sent) != 2 || sent[1].Sub(sent[0]) < time.Second {
			t.Errorf("sent at %v, want the second after the first's reply, a second later", sent)
		}
	})
}
