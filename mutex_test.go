package coord

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/lib/pq"
)

// memoryDriver keeps locks in memory, and does with renewals what the test says.
type memoryDriver struct {
	mu       sync.Mutex
	held     map[string]int64
	fence    int64
	forever  bool // locks do not expire
	extends  []time.Time
	extend   func(ctx context.Context) (bool, error) // nil: yes
	releases int
	lost     []func([]string)
}

func (d *memoryDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held == nil {
		d.held = map[string]int64{}
	}
	if d.held[name] > 0 {
		return DriverLock{}, &HeldError{What: name}
	}
	d.fence++
	d.held[name] = d.fence
	lock := DriverLock{Name: name, Fence: d.fence}
	if !d.forever {
		lock.Deadline = time.Now().Add(ttl)
	}
	return lock, nil
}

func (d *memoryDriver) Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error) {
	d.mu.Lock()
	d.extends = append(d.extends, time.Now())
	extend := d.extend
	d.mu.Unlock()
	if extend == nil {
		return true, nil
	}
	return extend(ctx)
}

func (d *memoryDriver) Release(ctx context.Context, lock DriverLock) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.releases++
	was := d.held[lock.Name] == lock.Fence
	if was {
		delete(d.held, lock.Name)
	}
	return was, nil
}

func (d *memoryDriver) Expiring() bool           { return !d.forever }
func (d *memoryDriver) OnLost(fn func([]string)) { d.lost = append(d.lost, fn) }
func (d *memoryDriver) Close() error             { return nil }
func (d *memoryDriver) renewals() []time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.extends)
}

// locked takes a lock of 30 s in a bubble.
func lockedFor30s(t *testing.T, d MutexDriver) *Lock {
	t.Helper()
	m, err := NewMutex(d, MutexConfig{TTL: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	lock, err := m.Lock(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// TestKeeperRenews about every third of the TTL, and never two at once.
func TestKeeperRenews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{}
		start := time.Now()
		lock := lockedFor30s(t, d)
		time.Sleep(10 * time.Minute)
		if err := lock.Err(); err != nil {
			t.Fatalf("Err = %v after ten minutes of renewals", err)
		}
		last := start
		for _, at := range d.renewals() {
			if pause := at.Sub(last); pause < 9*time.Second || pause > 10*time.Second {
				t.Errorf("%v between renewals, want 9 s to 10 s", pause)
			}
			last = at
		}
		if err := lock.Unlock(t.Context()); err != nil || lock.Err() != nil {
			t.Errorf("Unlock = %v, Err = %v, want nil", err, lock.Err())
		}
		select {
		case <-lock.Done():
		default:
			t.Error("Done is open after Unlock")
		}
	})
}

// TestKeeperDeadline: renewals that fail, hang or come too late lose the lock at
// its deadline less the margin, to the nanosecond, and one that fails loses nothing.
func TestKeeperDeadline(t *testing.T) {
	failure := errors.New("no route")
	for name, extend := range map[string]func(context.Context) (bool, error){
		"fails":              func(context.Context) (bool, error) { return false, failure },
		"hangs":              func(ctx context.Context) (bool, error) { <-ctx.Done(); return false, ctx.Err() },
		"hangs for ever":     func(context.Context) (bool, error) { time.Sleep(time.Hour); return true, nil },
		"answers a day late": func(context.Context) (bool, error) { time.Sleep(28 * time.Second); return true, nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &memoryDriver{extend: extend}
				start := time.Now()
				lock := lockedFor30s(t, d)
				<-lock.Done()
				if took := time.Since(start); took != 27*time.Second || !errors.Is(lock.Err(), ErrLost) {
					t.Errorf("lost after %v: %v, want after 27 s", took, lock.Err())
				}
				if err := lock.Unlock(t.Context()); !errors.Is(err, ErrLost) {
					t.Errorf("Unlock = %v, want ErrLost", err)
				}
				time.Sleep(2 * time.Hour) // Until the last of what hangs has come back.
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{}
		failed := 0
		d.extend = func(context.Context) (bool, error) {
			if failed++; failed == 1 {
				return false, failure
			}
			return true, nil
		}
		lock := lockedFor30s(t, d)
		time.Sleep(10 * time.Minute)
		if err := lock.Unlock(t.Context()); err != nil {
			t.Errorf("Unlock after one failed renewal = %v", err)
		}
		if renewals := d.renewals(); renewals[1].Sub(renewals[0]) > 10*time.Millisecond {
			t.Errorf("tried again after %v, want soon", renewals[1].Sub(renewals[0]))
		}
	})
}

// TestKeeperCountsFromTheSend: a renewal whose reply takes its time is good for the
// TTL from when it was sent.
func TestKeeperCountsFromTheSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{}
		d.extend = func(context.Context) (bool, error) {
			if len(d.renewals()) > 1 {
				return false, errors.New("no route")
			}
			time.Sleep(8 * time.Second)
			return true, nil
		}
		lock := lockedFor30s(t, d)
		<-lock.Done()
		if took := time.Since(d.renewals()[0]); took != 27*time.Second {
			t.Errorf("lost %v after the last good renewal was sent, want 27 s", took)
		}
		lock.Unlock(t.Context())
	})
}

// TestKeeperOneInFlight: a renewal that is slow is waited for before the next.
func TestKeeperOneInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{}
		inFlight, most := 0, 0
		var mu sync.Mutex
		d.extend = func(ctx context.Context) (bool, error) {
			mu.Lock()
			inFlight++
			most = max(most, inFlight)
			mu.Unlock()
			<-ctx.Done()
			mu.Lock()
			inFlight--
			mu.Unlock()
			return false, ctx.Err()
		}
		lock := lockedFor30s(t, d)
		<-lock.Done()
		lock.Unlock(t.Context())
		mu.Lock()
		defer mu.Unlock()
		if most != 1 {
			t.Errorf("%d renewals at once, want 1", most)
		}
	})
}

// TestKeeperZeroRows: that it is not there any more is final.
func TestKeeperZeroRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{extend: func(context.Context) (bool, error) { return false, nil }}
		lock := lockedFor30s(t, d)
		ctx, cancel := lock.Context(t.Context())
		defer cancel()
		start := time.Now()
		<-ctx.Done()
		if took := time.Since(start); took > 10*time.Second || !errors.Is(context.Cause(ctx), ErrLost) {
			t.Errorf("the context ended after %v with %v, want ErrLost at the first renewal", took, context.Cause(ctx))
		}
		if err := lock.Unlock(t.Context()); !errors.Is(err, ErrLost) {
			t.Errorf("Unlock = %v, want ErrLost", err)
		}
	})
}

// TestStuckExtend: a renewal that hangs in the driver is given up with its
// connection after the timeout, and the next saves the lock.
func TestStuckExtend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		var renewals atomic.Int64
		f := &fakeDriver{}
		c := newCoord(t, f, Config{Timeout: time.Second})
		d, err := c.TableDriver(DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		f.answer = func(s statement) (driver.Rows, error) {
			switch {
			case s.text == d.acquire:
				return &oneRow{true, "o", int64(1), int64(0)}, nil
			case s.text == d.renew && renewals.Add(1) == 1:
				<-stuck
			case s.text == d.renew:
				return &listRows{rows: [][]driver.Value{{"m", int64(1), true}}}, nil
			}
			return noRows{}, nil
		}
		lock := lockedFor30s(t, d)
		time.Sleep(12 * time.Second)
		if err := lock.Unlock(t.Context()); err != nil {
			t.Errorf("Unlock after a renewal that hung = %v", err)
		}
		extended := slices.DeleteFunc(f.statements(), func(s statement) bool { return s.text != d.renew })
		if len(extended) != 2 || extended[1].conn == extended[0].conn || extended[1].at.Sub(extended[0].at) > 1100*time.Millisecond {
			t.Errorf("renewals: %v, want a second on another connection a second later", extended)
		}
		close(stuck)
	})
}

// batchOf returns a batch whose renewals are sent at once.
func batchOf(most time.Duration, send func([]string) ([]fate, error)) *batch[string] {
	return newBatch(most, func(_ context.Context, _ time.Duration, all []string, answer answer) error {
		sent := time.Now()
		fates, err := send(all)
		if err == nil {
			answer(renewal{sent, fates})
		}
		return err
	})
}

// TestBatch: what is due is renewed by one statement, and what that finds is each lock's
// own: renewed, gone, or locked by another transaction and asked for again soon.
func TestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var sent [][]string
		var at []time.Time
		count := func() int { mu.Lock(); defer mu.Unlock(); return len(sent) }
		fates := map[string]fate{"gone": gone, "busy": busy}
		b := batchOf(5*time.Second, func(all []string) ([]fate, error) {
			mu.Lock()
			defer mu.Unlock()
			found := make([]fate, len(all))
			for i, name := range all {
				found[i] = renewed
				if f, ok := fates[name]; ok {
					found[i] = f
				}
			}
			delete(fates, "busy") // Once.
			sent, at = append(sent, slices.Sorted(slices.Values(all))), append(at, time.Now())
			return found, nil
		})
		start, held := time.Now(), map[string]*keeper{}
		for _, name := range []string{"a", "b", "busy", "gone"} {
			held[name] = b.keep(name, newHold(), start.Add(30*time.Second), pace{10 * time.Second, 30 * time.Second, 3 * time.Second})
		}
		time.Sleep(12 * time.Second)
		mu.Lock()
		first, times := slices.Clone(sent), slices.Clone(at)
		mu.Unlock()
		if len(first) != 2 || len(first[0]) != 4 || !slices.Equal(first[1], []string{"busy"}) {
			t.Fatalf("renewed %q, want all, then what was locked", first)
		}
		if pause := times[1].Sub(times[0]); pause > time.Second {
			t.Errorf("what was locked was asked for again after %v, want soon", pause)
		}
		if !errors.Is(held["gone"].err(), ErrLost) || held["a"].err() != nil || held["busy"].err() != nil {
			t.Errorf("lost: a %v, busy %v, gone %v, want the last alone", held["a"].err(), held["busy"].err(), held["gone"].err())
		}
		time.Sleep(10 * time.Minute)
		if n := count(); n > 70 {
			t.Errorf("%d statements in ten minutes, want one for all every nine seconds or so", n)
		}
		for _, k := range held {
			_ = k.stop()
		}
		before := count()
		time.Sleep(time.Minute)
		b.mu.Lock()
		defer b.mu.Unlock()
		if count() != before || len(b.held)+len(b.due) > 0 {
			t.Errorf("%d statements after all have left, %d held", count()-before, len(b.held))
		}
	})
}

// TestBatchFails: statements that fail, or hang whatever their context says, lose what is
// held at its deadline and no earlier, and a reply that comes late counts.
func TestBatchFails(t *testing.T) {
	failure := errors.New("no route")
	for _, test := range []struct {
		name string
		send func(call int) ([]fate, error)
		lost time.Duration // 0: not
	}{
		{"fails", func(int) ([]fate, error) { return nil, failure }, 27 * time.Second},
		{"hangs", func(int) ([]fate, error) { time.Sleep(time.Hour); return []fate{gone}, nil }, 27 * time.Second},
		{"fails twice", func(call int) ([]fate, error) {
			if call <= 2 {
				return nil, failure
			}
			return []fate{renewed}, nil
		}, 0},
		{"answers late", func(int) ([]fate, error) { time.Sleep(8 * time.Second); return []fate{renewed}, nil }, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var calls atomic.Int64
				b := batchOf(5*time.Second, func([]string) ([]fate, error) { return test.send(int(calls.Add(1))) })
				start := time.Now()
				k := b.keep("a", newHold(), start.Add(30*time.Second), pace{10 * time.Second, 30 * time.Second, 3 * time.Second})
				select {
				case <-k.ctx.Done():
					if took := time.Since(start); took != test.lost || !errors.Is(k.err(), ErrLost) {
						t.Errorf("lost after %v, want %v", took, test.lost)
					}
				case <-time.After(10 * time.Minute):
					if test.lost > 0 {
						t.Error("not lost")
					}
				}
				_ = k.stop()
				time.Sleep(2 * time.Hour) // Until what hangs has come back.
			})
		})
	}
}

// oneRow is an answer of one row.
type oneRow []driver.Value

func (r *oneRow) Columns() []string { return make([]string, 4) }
func (r *oneRow) Close() error      { return nil }
func (r *oneRow) Next(to []driver.Value) error {
	if len(*r) == 0 {
		return io.EOF
	}
	copy(to, *r)
	*r = nil
	return nil
}

// TestTableDriverStatements: what each operation sends, and what it makes of the
// answer.
func TestTableDriverStatements(t *testing.T) {
	at := time.Date(2031, 5, 17, 10, 30, 0, 123456000, time.UTC)
	c, mock := newMock(t, Config{Owner: "me", Clock: func() time.Time { return at }})
	ctx, now, minute := t.Context(), at.UnixMicro(), int64(60e6)
	d, err := c.TableDriver(DriverConfig{Prefix: "app/"})
	if err != nil {
		t.Fatal(err)
	}
	columns := []string{"granted", "owner", "fence", "expires"}
	mock.ExpectQuery(d.acquire).WithArgs("app/m", "me", minute, now, sqlmock.AnyArg()).WillReturnRows(sqlmock.NewRows(columns).AddRow(true, "", 0, 0))
	mock.ExpectQuery(d.acquire).WithArgs("app/m", "me", minute, now, sqlmock.AnyArg()).WillReturnRows(sqlmock.NewRows(columns).AddRow(true, "me", 7, now))
	lock, err := d.Acquire(ctx, "m", time.Minute)
	if err != nil || lock.Name != "m" || lock.Fence != 7 {
		t.Errorf("Acquire that made the row = %+v, %v, want token 7", lock, err)
	}
	mock.ExpectQuery(d.acquire).WillReturnRows(sqlmock.NewRows(columns).AddRow(false, "you", 7, now+1))
	_, err = d.Acquire(ctx, "m", time.Minute)
	wantHeld(t, err, HeldError{"mutex m", "you", at.Add(time.Microsecond)})
	mock.ExpectQuery(d.acquire).WillReturnRows(sqlmock.NewRows(columns))
	mock.ExpectQuery(d.holder).WithArgs("app/m", now).WillReturnRows(sqlmock.NewRows([]string{"owner", "expires"}).AddRow("they", now+2))
	_, err = d.Acquire(ctx, "m", time.Minute)
	wantHeld(t, err, HeldError{"mutex m", "they", at.Add(2 * time.Microsecond)})
	mock.ExpectExec(d.extend).WithArgs("app/m", 7, minute, now).WillReturnResult(sqlmock.NewResult(0, 1))
	if ok, err := d.Extend(ctx, lock, time.Minute); !ok || err != nil {
		t.Errorf("Extend = %v, %v", ok, err)
	}
	mock.ExpectExec(d.release).WithArgs("app/m", 7, sqlmock.AnyArg()).WillReturnResult(sqlmock.NewResult(0, 0))
	if ok, err := d.Release(ctx, lock); ok || err != nil {
		t.Errorf("Release without a row = %v, %v, want false", ok, err)
	}
}

// TestTableDriverSlowGrant: a lock whose grant came when it was nearly over is asked
// for again, by the same attempt.
func TestTableDriverSlowGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, mock := newMock(t, Config{Owner: "me", Timeout: time.Minute})
		d, err := c.TableDriver(DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		row := func(fence int64) *sqlmock.Rows {
			return sqlmock.NewRows([]string{"granted", "owner", "fence", "expires"}).AddRow(true, "me", fence, 0)
		}
		mock.ExpectQuery(d.acquire).WillDelayFor(31 * time.Second).WillReturnRows(row(7))
		mock.ExpectQuery(d.acquire).WillDelayFor(time.Second).WillReturnRows(row(8))
		lock, err := d.Acquire(t.Context(), "m", time.Minute)
		if left := time.Until(lock.Deadline); err != nil || lock.Fence != 8 || left != 59*time.Second {
			t.Errorf("Acquire = %+v, %v, for %v, want token 8 for 59 s", lock, err, left)
		}
	})
}

// TestTableDriverLostReply: the grant that may be there is released by its attempt,
// once it is known, or not at all if the acquisition failed for sure.
func TestTableDriverLostReply(t *testing.T) {
	for _, test := range []struct {
		name   string
		answer error // that comes a second after the caller has left
		undone bool
	}{
		{"granted after all", nil, true},
		{"connection lost", driver.ErrBadConn, true},
		{"refused by the server", &pq.Error{Code: "57014"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeDriver{}
				c := newCoord(t, f, Config{})
				d, err := c.TableDriver(DriverConfig{})
				if err != nil {
					t.Fatal(err)
				}
				f.answer = func(s statement) (driver.Rows, error) {
					if s.text == d.acquire {
						time.Sleep(5 * time.Millisecond)
						return &oneRow{true, "o", int64(1), int64(0)}, test.answer
					}
					return noRows{}, nil
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				start := time.Now()
				if _, err := d.Acquire(ctx, "m", time.Minute); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Millisecond {
					t.Errorf("Acquire = %v after %v, want DeadlineExceeded after 1 ms", err, time.Since(start))
				}
				time.Sleep(time.Minute)
				undone := false
				for _, s := range f.statements() {
					undone = undone || s.text == d.undo
				}
				if undone != test.undone {
					t.Errorf("undone: %v, want %v", undone, test.undone)
				}
			})
		})
	}
}

// TestLostLockLetsOthersThrough though its holder never unlocks it.
func TestLostLockLetsOthersThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{forever: true}
		m, err := NewMutex(d, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		lock, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		next := make(chan error, 1)
		go func() {
			lock, err := m.Lock(t.Context(), "m")
			if err == nil {
				err = lock.Unlock(t.Context())
			}
			next <- err
		}()
		synctest.Wait()
		d.mu.Lock()
		clear(d.held)
		d.mu.Unlock()
		d.lost[0]([]string{"another", "m"})
		if err := <-next; err != nil {
			t.Errorf("the next Lock = %v", err)
		}
		if err := lock.Unlock(t.Context()); !errors.Is(err, ErrLost) {
			t.Errorf("Unlock = %v, want ErrLost", err)
		}
		if len(m.d.queue().of)+len(m.locks) != 0 {
			t.Errorf("%d lines and %d locks are left, want 0", len(m.d.queue().of), len(m.locks))
		}
	})
}

// TestLineIsLeft: whoever gives up, at whatever moment, leaves the line.
func TestLineIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &memoryDriver{}
		m, err := NewMutex(d, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
				defer cancel()
				lock, err := m.Lock(ctx, "m")
				if err != nil {
					return
				}
				time.Sleep(time.Millisecond)
				lock.Unlock(ctx)
			})
		}
		wg.Wait()
		if len(m.d.queue().of)+len(m.locks)+len(d.held) != 0 {
			t.Errorf("%d lines, %d locks and %d held names are left, want 0", len(m.d.queue().of), len(m.locks), len(d.held))
		}
	})
}

// TestLossDuringTheGrant: told before the lock is known to the Mutex, it counts.
func TestLossDuringTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &lossyDriver{memoryDriver: memoryDriver{forever: true}}
		m, err := NewMutex(d, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		lock, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-lock.Done():
		default:
			t.Error("Done is open though the loss was told")
		}
		if err := lock.Unlock(t.Context()); !errors.Is(err, ErrLost) || len(m.d.queue().of)+len(m.locks) != 0 {
			t.Errorf("Unlock = %v, %d lines and %d locks left, want ErrLost and nothing", err, len(m.d.queue().of), len(m.locks))
		}
	})
}

// lossyDriver loses what it grants, and what it is asked for panics the second time.
type lossyDriver struct {
	memoryDriver
	calls int
}

func (d *lossyDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	if d.calls++; d.calls == 2 {
		panic("oops")
	}
	lock, err := d.memoryDriver.Acquire(ctx, name, ttl)
	d.lost[0]([]string{name})
	return lock, err
}

// TestDriverPanics: the line is left.
func TestDriverPanics(t *testing.T) {
	for _, lock := range []func(*Mutex) error{
		func(m *Mutex) error { _, err := m.Lock(t.Context(), "m"); return err },
		func(m *Mutex) error { _, err := m.TryLock(t.Context(), "m"); return err },
	} {
		m, err := NewMutex(&lossyDriver{calls: 1}, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			lock(m)
		}()
		if len(m.d.queue().of) != 0 {
			t.Error("the line is not left after a panic")
		}
	}
}

// TestDoReturnsWhatFnReturns, itself.
func TestDoReturnsWhatFnReturns(t *testing.T) {
	m, err := NewMutex(&memoryDriver{}, MutexConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Do(t.Context(), "m", func(context.Context, *Lock) error { return io.EOF }); err != io.EOF {
		t.Errorf("Do = %v, want io.EOF itself", err)
	}
}

// TestKeeperAfterSuspension: when both timers are overdue nothing is renewed.
func TestKeeperAfterSuspension(t *testing.T) {
	was := false
	b := batchOf(time.Second, func([]string) ([]fate, error) {
		was = true
		return []fate{renewed}, nil
	})
	k := &keeper{hold: newHold(), pace: pace{time.Second, 3 * time.Second, time.Second}, deadline: time.Now().Add(time.Second)}
	b.held[k], b.due[k] = "a", time.Now()
	b.run() // The timer of the renewal, before that of the watchdog.
	if was || !errors.Is(k.err(), ErrLost) {
		t.Errorf("renewed %v, err %v, want lost without a renewal", was, k.err())
	}
}

func TestBackoff(t *testing.T) {
	for _, test := range []struct {
		attempts    int
		least, most time.Duration
		want        time.Duration // at most; at least half of it
	}{
		{1, 10, 100, 10}, {2, 10, 100, 20}, {4, 10, 100, 80}, {5, 10, 100, 100}, {1000, 10, 100, 100}, {3, 0, 100, 0},
		{100, 3 * time.Hour, maxTTL, maxTTL}, {100, math.MaxInt64, math.MaxInt64, math.MaxInt64}, {100, math.MaxInt64 - 1, math.MaxInt64, math.MaxInt64},
	} {
		if got := backoff(test.attempts, test.least, test.most); got > test.want || got < test.want/2 {
			t.Errorf("backoff(%d, %d, %d) = %d, want %d to %d", test.attempts, test.least, test.most, got, test.want/2, test.want)
		}
	}
}

// TestDriversAtOnce: making a driver races with nothing.
func TestDriversAtOnce(t *testing.T) {
	d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return changed{}, nil }}
	c := newCoord(t, d, Config{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			table, err := c.TableDriver(DriverConfig{})
			if err != nil {
				t.Error(err)
				return
			}
			c.Purge(t.Context(), 0)
			table.Close()
		})
	}
	wg.Wait()
	if len(c.parts) != 1 {
		t.Errorf("%d closed drivers are kept, want 0", len(c.parts)-1) // The other part is the session.
	}
}

func TestNewMutexRefuses(t *testing.T) {
	d := &memoryDriver{}
	for _, cfg := range []MutexConfig{
		{TTL: time.Microsecond},
		{TTL: -time.Second},
		{TTL: 11 * 365 * 24 * time.Hour},
		{TTL: time.Second, Renew: 501 * time.Millisecond},
		{Renew: -1},
		{Margin: -1},
		{TTL: time.Second, Renew: 400 * time.Millisecond, Margin: 600 * time.Millisecond},
		{RetryMin: -1},
		{RetryMin: time.Second, RetryMax: time.Millisecond},
	} {
		if _, err := NewMutex(d, cfg); !errors.Is(err, ErrInvalid) {
			t.Errorf("NewMutex(%+v) = %v, want ErrInvalid", cfg, err)
		}
	}
	if _, err := NewMutex(nil, MutexConfig{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("NewMutex(nil) = %v, want ErrInvalid", err)
	}
	m, err := NewMutex(d, MutexConfig{TTL: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "\x00", "\xff"} {
		if _, err := m.TryLock(t.Context(), name); !errors.Is(err, ErrInvalid) {
			t.Errorf("TryLock(%q) = %v, want ErrInvalid", name, err)
		}
		if _, err := m.Lock(t.Context(), name); !errors.Is(err, ErrInvalid) {
			t.Errorf("Lock(%q) = %v, want ErrInvalid", name, err)
		}
	}
}

func TestDriverConfigs(t *testing.T) {
	c, _ := newMock(t, Config{Schema: "app"})
	for _, cfg := range []DriverConfig{{Table: "a b"}, {Table: "a.b.c"}, {Table: ".a"}, {Table: "a."}, {Table: "1a"},
		{Table: "coord_lease"}, {Table: "coord_member"}, {Table: "app.coord_format"},
		{Table: "x23456789_123456789_123456789_123456789_123456789_123456789"}, {Prefix: "\xff"}} {
		if _, err := c.TableDriver(cfg); !errors.Is(err, ErrInvalid) {
			t.Errorf("TableDriver(%+v) = %v, want ErrInvalid", cfg, err)
		}
	}
	for table, want := range map[string]string{"": `"app"."coord_mutex"`, "locks": `"app"."locks"`, "Other.locks": `"Other"."locks"`} {
		d, err := c.TableDriver(DriverConfig{Table: table})
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf(`"%s"."%s"`, d.table.schema, d.table.name); got != want {
			t.Errorf("Table %q is %s, want %s", table, got, want)
		}
	}
}

// TestAdvisoryKey: others look it up.
func TestAdvisoryKey(t *testing.T) {
	if got, want := AdvisoryKey("hello"), int64(0x2cf24dba5fb0a30e); got != want {
		t.Errorf("AdvisoryKey(hello) = %d, want %d", got, want)
	}
}

// wrapper is a driver that embeds one of this package and has methods of its own.
type wrapper struct {
	*TableDriver
	acquired, extended, released atomic.Int64
}

func (w *wrapper) Acquire(_ context.Context, name string, ttl time.Duration) (DriverLock, error) {
	w.acquired.Add(1)
	return DriverLock{Name: name, Fence: 1, Deadline: time.Now().Add(ttl)}, nil
}

func (w *wrapper) Extend(context.Context, DriverLock, time.Duration) (bool, error) {
	w.extended.Add(1)
	return true, nil
}

func (w *wrapper) Release(context.Context, DriverLock) (bool, error) {
	w.released.Add(1)
	return true, nil
}

// TestWrappedDriver: a Mutex calls all methods of a driver that embeds another.
func TestWrappedDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeDriver{answer: func(statement) (driver.Rows, error) { return &oneRow{true}, nil }}
		c := newCoord(t, f, Config{Owner: "node"})
		table, err := c.TableDriver(DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		w := &wrapper{TableDriver: table}
		m, err := NewMutex(w, MutexConfig{})
		if err != nil {
			t.Fatal(err)
		}
		lock, err := m.Lock(t.Context(), "m")
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.TryLock(t.Context(), "m")
		wantHeld(t, err, HeldError{What: "mutex m", Owner: "node"})
		time.Sleep(time.Minute)
		if err := lock.Unlock(t.Context()); err != nil {
			t.Errorf("Unlock = %v", err)
		}
		if w.acquired.Load() != 1 || w.extended.Load() < 5 || w.released.Load() != 1 {
			t.Errorf("%d acquired, %d extended, %d released, want all by the wrapper", w.acquired.Load(), w.extended.Load(), w.released.Load())
		}
	})
}
