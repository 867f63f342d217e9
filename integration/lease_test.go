package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// grant is how a lease came to be before the operation under test.
func grant(t *testing.T, s *coord.LeaseStore, owner string, ttl time.Duration) coord.Lease {
	t.Helper()
	lease, err := s.Acquire(t.Context(), "jobs", 3, owner, ttl)
	if err != nil {
		t.Fatalf("Acquire(%s) = %v", owner, err)
	}
	return lease
}

// leaseStates are the rows of the contract's table, made for partition 3 of jobs
// as seen by owner o.
var leaseStates = []struct {
	name string
	make func(t *testing.T, e *env, s *coord.LeaseStore)
	// What the operations by o answer, and the epoch after Acquire.
	epoch              int64 // 0: ErrHeld
	renewed, guarded   bool
	released, relAgain bool
	owner              string // in Owners; "" is none
}{
	{name: "no row", make: func(*testing.T, *env, *coord.LeaseStore) {}, epoch: 1},
	{name: "other, live", make: func(t *testing.T, e *env, s *coord.LeaseStore) { grant(t, s, "p", time.Hour) }, owner: "p"},
	{name: "other, expired", make: func(t *testing.T, e *env, s *coord.LeaseStore) {
		e.pass(t, grant(t, s, "p", 20*time.Millisecond).ExpiresAt)
	}, epoch: 2},
	{name: "released by other", make: func(t *testing.T, e *env, s *coord.LeaseStore) {
		grant(t, s, "p", time.Hour)
		s.Release(t.Context(), "jobs", 3, "p")
	}, epoch: 2},
	{name: "own, released", make: func(t *testing.T, e *env, s *coord.LeaseStore) {
		grant(t, s, "o", time.Hour)
		s.Release(t.Context(), "jobs", 3, "o")
	}, epoch: 2},
	{name: "own, live", make: func(t *testing.T, e *env, s *coord.LeaseStore) { grant(t, s, "o", time.Hour) },
		epoch: 2, renewed: true, guarded: true, released: true, owner: "o"},
	{name: "own, expired", make: func(t *testing.T, e *env, s *coord.LeaseStore) {
		e.pass(t, grant(t, s, "o", 20*time.Millisecond).ExpiresAt)
	}, epoch: 2, released: true},
	{name: "own, expired long ago", make: func(t *testing.T, e *env, s *coord.LeaseStore) {
		e.pass(t, grant(t, s, "o", 20*time.Millisecond).ExpiresAt.Add(time.Millisecond))
	}, epoch: 2, released: true},
}

// epochOf is the epoch that owner o last had in a state.
const ownEpoch = 1

func TestLeaseTable(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		for _, state := range leaseStates {
			t.Run(state.name, func(t *testing.T) {
				fresh := func(t *testing.T) {
					e.exec(t, "DELETE FROM coord_lease")
					state.make(t, e, s)
				}
				if err := s.Guard(t.Context(), e.db, coord.Lease{Group: "jobs", Partition: 3, Owner: "o", Epoch: 1}); !errors.Is(err, coord.ErrInvalid) {
					t.Errorf("Guard on a *sql.DB = %v, want ErrInvalid", err)
				}
				if _, err := s.Owners(t.Context(), "jobs"); err != nil {
					t.Fatal(err) // Makes the table.
				}
				t.Run("acquire", func(t *testing.T) {
					fresh(t)
					lease, err := s.Acquire(t.Context(), "jobs", 3, "o", time.Hour)
					if state.epoch == 0 {
						var held *coord.HeldError
						if !errors.Is(err, coord.ErrHeld) || !errors.As(err, &held) || held.Owner != "p" {
							t.Fatalf("Acquire = %+v, %v, want ErrHeld by p", lease, err)
						}
						return
					}
					if err != nil || lease.Epoch != state.epoch || lease.Owner != "o" {
						t.Fatalf("Acquire = %+v, %v, want epoch %d", lease, err, state.epoch)
					}
				})
				t.Run("renew", func(t *testing.T) {
					fresh(t)
					leases, err := s.Renew(t.Context(), "jobs", []int{3}, "o", time.Hour)
					if err != nil || (len(leases) == 1) != state.renewed {
						t.Fatalf("Renew = %+v, %v, want renewed %v", leases, err, state.renewed)
					}
					if state.renewed && (leases[0].Epoch != ownEpoch || !leases[0].ExpiresAt.After(e.now(t).Add(59*time.Minute))) {
						t.Errorf("Renew = %+v, want epoch %d for an hour", leases[0], ownEpoch)
					}
				})
				t.Run("release", func(t *testing.T) {
					fresh(t)
					for _, want := range []bool{state.released, state.relAgain} {
						if got, err := s.Release(t.Context(), "jobs", 3, "o"); got != want || err != nil {
							t.Fatalf("Release = %v, %v, want %v", got, err, want)
						}
					}
				})
				t.Run("owners", func(t *testing.T) {
					fresh(t)
					leases, err := s.Owners(t.Context(), "jobs")
					if err != nil || (len(leases) == 1) != (state.owner != "") {
						t.Fatalf("Owners = %+v, %v, want %q", leases, err, state.owner)
					}
					if state.owner != "" && (leases[0].Owner != state.owner || leases[0].Epoch != 1 || !leases[0].Deadline.IsZero()) {
						t.Errorf("Owners = %+v, want %s at epoch 1 without a deadline", leases[0], state.owner)
					}
				})
				t.Run("guard", func(t *testing.T) {
					fresh(t)
					err := inTx(t, e.db, nil, func(tx *sql.Tx) error {
						return s.Guard(t.Context(), tx, coord.Lease{Group: "jobs", Partition: 3, Owner: "o", Epoch: ownEpoch})
					})
					if state.guarded && err != nil || !state.guarded && !errors.Is(err, coord.ErrLost) {
						t.Fatalf("Guard = %v, want held %v", err, state.guarded)
					}
				})
			})
		}
	})
}

// inTx runs do in a transaction that is committed if do returns nil.
func inTx(t testing.TB, db *sql.DB, opts *sql.TxOptions, do func(*sql.Tx) error) error {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if err := do(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func TestLeaseExpiresAtTheEqualInstant(t *testing.T) {
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			e := newEnv(t, e, newClock())
			s := e.coord(t).Leases()
			a := grant(t, s, "a", time.Second)
			if want := e.clock.Now().Add(time.Second); !a.ExpiresAt.Equal(want) {
				t.Fatalf("ExpiresAt = %v, want %v", a.ExpiresAt, want)
			}
			e.clock.set(a.ExpiresAt.Add(-time.Microsecond))
			if _, err := s.Acquire(t.Context(), "jobs", 3, "b", time.Second); !errors.Is(err, coord.ErrHeld) {
				t.Fatalf("Acquire(b) a microsecond before expiry = %v, want ErrHeld", err)
			}
			if leases, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Microsecond*1000); len(leases) != 1 || err != nil {
				t.Fatalf("Renew(a) a microsecond before expiry = %v, %v, want it", leases, err)
			}
			e.clock.set(e.clock.Now().Add(time.Millisecond))
			if leases, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Second); len(leases) != 0 || err != nil {
				t.Fatalf("Renew(a) at expiry = %v, %v, want nothing", leases, err)
			}
			if leases, err := s.Owners(t.Context(), "jobs"); len(leases) != 0 || err != nil {
				t.Fatalf("Owners at expiry = %v, %v, want nothing", leases, err)
			}
			if b := grant(t, s, "b", time.Second); b.Epoch != 2 {
				t.Fatalf("Acquire(b) at expiry = %+v, want epoch 2", b)
			}
		})
	}
}

func TestLeaseDeadlineCountsFromTheSend(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		check := func(op string, l coord.Lease, before, after time.Time) {
			t.Helper()
			if l.Deadline.Before(before.Add(time.Hour)) || l.Deadline.After(after.Add(time.Hour)) {
				t.Errorf("%s: Deadline %v is not an hour after a moment between %v and %v", op, l.Deadline, before, after)
			}
		}
		before := time.Now()
		a := grant(t, s, "a", time.Hour)
		check("Acquire", a, before, time.Now())
		before = time.Now()
		leases, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour)
		if err != nil || len(leases) != 1 {
			t.Fatalf("Renew = %v, %v", leases, err)
		}
		check("Renew", leases[0], before, time.Now())
	})
}

// TestLeaseDeadlineIsKept: nobody takes a lease over before its former holder's
// deadline has passed, not even by the grain of the database's clock.
func TestLeaseDeadlineIsKept(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		for i := range 100 {
			held := grant(t, s, fmt.Sprint("a", i), 2*time.Millisecond)
			for {
				_, err := s.Acquire(t.Context(), "jobs", 3, fmt.Sprint("a", i+1), time.Millisecond)
				taken := time.Now()
				if errors.Is(err, coord.ErrHeld) {
					continue
				}
				if err != nil || taken.Before(held.Deadline) {
					t.Fatalf("Acquire = %v, %v before the former holder's deadline", err, held.Deadline.Sub(taken))
				}
				break
			}
		}
	})
}

func TestLeaseRenewMany(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		for _, p := range []int{10, 2, 7, 0} {
			if _, err := s.Acquire(t.Context(), "jobs", p, "o", time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		s.Acquire(t.Context(), "jobs", 5, "p", time.Hour)
		s.Acquire(t.Context(), "other", 2, "o", time.Hour)
		leases, err := s.Renew(t.Context(), "jobs", []int{10, 5, 2, 2, 99, 0, 10}, "o", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, l := range leases {
			got = append(got, l.Partition)
			if l.Group != "jobs" || l.Owner != "o" || l.Epoch != 1 {
				t.Errorf("Renew: %+v, want jobs, o, epoch 1", l)
			}
		}
		if want := []int{0, 2, 10}; !slices.Equal(got, want) {
			t.Errorf("Renew = partitions %v, want %v", got, want)
		}
		if leases, err := s.Renew(t.Context(), "jobs", nil, "o", time.Hour); len(leases) != 0 || err != nil {
			t.Errorf("Renew(nothing) = %v, %v, want nothing", leases, err)
		}
		owners, err := s.Owners(t.Context(), "jobs")
		if err != nil || !slices.IsSortedFunc(owners, func(a, b coord.Lease) int { return a.Partition - b.Partition }) || len(owners) != 5 {
			t.Errorf("Owners = %v, %v, want 5 in order", owners, err)
		}
	})
}

func TestLeaseKeysAreBytes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		groups := []string{"a", "A", "é", "e\u0301", "a ", " a", `a"b`, "a'b", `a\b`, "%", "😀", "coord_lease", "NULL"}
		for _, group := range groups {
			for _, owner := range groups {
				want := int64(1)
				lease, err := s.Acquire(t.Context(), group, 0, owner, time.Hour)
				if owner != groups[0] {
					if !errors.Is(err, coord.ErrHeld) {
						t.Fatalf("Acquire(%q by %q) = %v, want ErrHeld", group, owner, err)
					}
					continue
				}
				if err != nil || lease.Epoch != want {
					t.Fatalf("Acquire(%q by %q) = %+v, %v, want epoch %d", group, owner, lease, err, want)
				}
			}
		}
		for _, group := range groups {
			if owners, err := s.Owners(t.Context(), group); err != nil || len(owners) != 1 || owners[0].Owner != "a" {
				t.Errorf("Owners(%q) = %v, %v, want a's", group, owners, err)
			}
		}
	})
}

// TestLeaseRace: many rivals, few of them in one pool. Every grant has an epoch of
// its own, and between two grants there was a release.
func TestLeaseRace(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		const pools, rivals, rounds = 8, 64, 12
		var stores []*coord.LeaseStore
		for range pools {
			db := e.open(t)
			db.SetMaxOpenConns(4)
			stores = append(stores, newCoord(t, db, e.dialect, e.config()).Leases())
		}
		var epochs []int64
		for round := range rounds {
			var mu sync.Mutex
			var winners []coord.Lease
			var wg sync.WaitGroup
			start := make(chan struct{})
			for i := range rivals {
				wg.Go(func() {
					<-start
					owner := fmt.Sprintf("rival-%d", i)
					lease, err := stores[i%pools].Acquire(t.Context(), "race", 0, owner, time.Hour)
					switch {
					case err == nil:
						mu.Lock()
						winners = append(winners, lease)
						mu.Unlock()
					case !errors.Is(err, coord.ErrHeld):
						t.Errorf("Acquire(%s) = %v, want ErrHeld", owner, err)
					}
				})
			}
			close(start)
			wg.Wait()
			if len(winners) != 1 {
				t.Fatalf("round %d: %d winners, want 1: %+v", round, len(winners), winners)
			}
			epochs = append(epochs, winners[0].Epoch)
			if ok, err := stores[0].Release(t.Context(), "race", 0, winners[0].Owner); !ok || err != nil {
				t.Fatalf("Release = %v, %v", ok, err)
			}
		}
		for i, epoch := range epochs {
			if epoch != int64(i+1) {
				t.Fatalf("epochs = %v, want 1 to %d", epochs, rounds)
			}
		}
	})
}

// TestLeaseRaceOnExpiry: rivals pounce on an expired lease.
func TestLeaseRaceOnExpiry(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := []*coord.LeaseStore{e.coord(t).Leases(), newCoord(t, e.open(t), e.dialect, e.config()).Leases()}
		var mu sync.Mutex
		var all []coord.Lease
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 25 {
					lease, err := s[i%2].Acquire(t.Context(), "race", 0, fmt.Sprint("rival-", i), 3*time.Millisecond)
					if err == nil {
						mu.Lock()
						all = append(all, lease)
						mu.Unlock()
					} else if !errors.Is(err, coord.ErrHeld) {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		slices.SortFunc(all, func(a, b coord.Lease) int { return int(a.Epoch - b.Epoch) })
		for i, lease := range all {
			if lease.Epoch != int64(i+1) {
				t.Fatalf("the %d. grant has epoch %d", i+1, lease.Epoch)
			}
			if i > 0 && lease.Owner != all[i-1].Owner && lease.ExpiresAt.Add(-3*time.Millisecond).Before(all[i-1].ExpiresAt) {
				t.Errorf("%+v was granted before %+v had expired", lease, all[i-1])
			}
		}
	})
}

// TestLeaseGuard: a takeover asks again until an open guard has ended; a renewal and a
// release do not wait for it (on SQLite everything waits).
func TestLeaseGuard(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		rival := newCoord(t, e.open(t), e.dialect, e.config()).Leases()
		for _, opts := range []*sql.TxOptions{nil, {Isolation: sql.LevelRepeatableRead}, {Isolation: sql.LevelSerializable}} {
			lease := grant(t, s, "a", time.Hour)
			tx, err := e.db.BeginTx(t.Context(), opts)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			if err := s.Guard(t.Context(), tx, lease); err != nil {
				t.Fatalf("Guard = %v, want held", err)
			}
			if renewed, err := s.Renew(t.Context(), "jobs", []int{3}, "a", time.Hour); len(renewed) != 1 || err != nil {
				t.Fatalf("Renew during a guard = %v, %v, want it", renewed, err)
			}
			if ok, err := s.Release(t.Context(), "jobs", 3, "a"); !ok || err != nil {
				t.Fatalf("Release during a guard = %v, %v, want true", ok, err)
			}
			taken := make(chan error, 1)
			go func() {
				_, err := rival.Acquire(context.Background(), "jobs", 3, "b", time.Hour)
				taken <- err
			}()
			e.asksAgain(t, "coord_lease", 0)
			select {
			case err := <-taken:
				t.Fatalf("Acquire(b) = %v while the guard was open", err)
			default:
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			if err := <-taken; err != nil {
				t.Fatalf("Acquire(b) after the guard = %v", err)
			}
			if err := inTx(t, e.db, opts, func(tx *sql.Tx) error { return s.Guard(t.Context(), tx, lease) }); !errors.Is(err, coord.ErrLost) {
				t.Fatalf("Guard after the takeover = %v, want ErrLost", err)
			}
			rival.Release(t.Context(), "jobs", 3, "b")
		}
	})
}

// TestLeaseGuardOldEpoch: a restarted process fences off its former self.
func TestLeaseGuardOldEpoch(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		old := grant(t, s, "a", time.Hour)
		young := grant(t, s, "a", time.Hour)
		for _, c := range []struct {
			lease coord.Lease
			want  error
		}{{old, coord.ErrLost}, {young, nil}} {
			err := inTx(t, e.db, nil, func(tx *sql.Tx) error { return s.Guard(t.Context(), tx, c.lease) })
			if !errors.Is(err, c.want) {
				t.Errorf("Guard(epoch %d) = %v, want %v", c.lease.Epoch, err, c.want)
			}
		}
	})
}

// renewal is what Renew returned.
type renewal struct {
	leases []coord.Lease
	err    error
}

// renewInBackground calls Renew for an hour, for a caller that does not wait.
func renewInBackground(s *coord.LeaseStore, partitions []int, owner string) <-chan renewal {
	done := make(chan renewal, 1)
	go func() {
		leases, err := s.Renew(context.Background(), "jobs", partitions, owner, time.Hour)
		done <- renewal{leases, err}
	}()
	return done
}

// TestLeaseLockedRow: a grant that had to ask for a locked row again lasts its full TTL from
// the moment the row is owned. A renewal that asked for it past its expiry renews nothing.
func TestLeaseLockedRow(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		held := grant(t, s, "a", 3*time.Second)
		lock := func() *sql.Tx {
			t.Helper()
			tx, err := e.db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec("SELECT FROM coord_lease FOR UPDATE"); err != nil {
				t.Fatal(err)
			}
			return tx
		}
		tx := lock()
		defer tx.Rollback()
		renewed := renewInBackground(s, []int{3}, "a")
		e.asksAgain(t, "coord_lease", 0)
		e.pass(t, held.ExpiresAt)
		tx.Rollback() // The row was only locked.
		if r := <-renewed; len(r.leases) != 0 || r.err != nil {
			t.Fatalf("Renew that asked past the expiry = %v, %v, want nothing", r.leases, r.err)
		}

		tx = lock()
		defer tx.Rollback()
		acquired := make(chan renewal, 1)
		go func() {
			lease, err := s.Acquire(context.Background(), "jobs", 3, "b", time.Hour)
			acquired <- renewal{[]coord.Lease{lease}, err}
		}()
		e.asksAgain(t, "coord_lease", 0)
		freed := e.now(t)
		tx.Rollback()
		if r := <-acquired; r.err != nil || r.leases[0].ExpiresAt.Before(freed.Add(time.Hour)) {
			t.Fatalf("Acquire of a row that was locked = %+v, %v, want a full hour from %v", r.leases, r.err, freed)
		}
	})
}

// TestLeaseRenewBesideALock: while a row is locked the others are renewed. The lease of the
// locked row is lost if it expires meanwhile, and renewed if it does not.
func TestLeaseRenewBesideALock(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		ttls := map[int]time.Duration{1: 3 * time.Second, 2: time.Hour, 4: 3 * time.Second}
		for partition, ttl := range ttls {
			if _, err := s.Acquire(t.Context(), "jobs", partition, "o", ttl); err != nil {
				t.Fatal(err)
			}
		}
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec("SELECT FROM coord_lease WHERE partition IN (1, 2) FOR UPDATE"); err != nil {
			t.Fatal(err)
		}
		renewed := renewInBackground(s, []int{1, 2, 4}, "o")
		e.asksAgain(t, "coord_lease", 0)
		e.pass(t, e.now(t).Add(ttls[1]))
		tx.Rollback()
		r := <-renewed
		if r.err != nil || len(r.leases) != 2 || r.leases[0].Partition != 2 || r.leases[1].Partition != 4 {
			t.Errorf("Renew = %v, %v, want partitions 2 and 4", r.leases, r.err)
		}
	})
}

// TestLeaseLateAttempt: an acquisition that arrives after a later one of the same
// Coord does not supersede it.
func TestLeaseLateAttempt(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		lease := grant(t, s, "o", time.Hour)
		var attempt int64
		e.scan(t, "SELECT attempt FROM coord_lease", &attempt)
		acquire := sectionText(t, e.dialect, "lease.sql", "acquire")
		for _, c := range []struct {
			attempt int64
			granted int
		}{{attempt - 1, 0}, {attempt, 1}, {attempt + 1, 1}, {attempt + 1<<32, 1}, {attempt - 1, 1}} {
			granted := 0
			rows, err := e.db.Query(acquire, "jobs", int64(3), "o", time.Hour.Microseconds(), nil, c.attempt)
			if err != nil {
				t.Fatal(err)
			}
			for rows.Next() {
				granted++
			}
			if err := rows.Close(); err != nil || granted != c.granted {
				t.Errorf("attempt %+d after %+d: %d rows, %v, want %d", c.attempt-attempt, 0, granted, err, c.granted)
			}
		}
		if again := grant(t, s, "o", time.Hour); again.Epoch <= lease.Epoch {
			t.Errorf("epoch %d after %d", again.Epoch, lease.Epoch)
		}
	})
}

// TestLeaseRenewOppositeOrders: renewals of overlapping sets never deadlock.
func TestLeaseRenewOppositeOrders(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		var up, down []int
		s := e.coord(t).Leases()
		for p := range 40 {
			up, down = append(up, p), append([]int{p}, down...)
			if _, err := s.Acquire(t.Context(), "jobs", p, "o", time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for i := range 6 {
			store := newCoord(t, e.open(t), e.dialect, e.config()).Leases()
			wg.Go(func() {
				for range 20 {
					partitions := [][]int{up, down}[i%2]
					if leases, err := store.Renew(t.Context(), "jobs", partitions, "o", time.Hour); len(leases) != 40 || err != nil {
						t.Errorf("Renew = %d leases, %v, want 40", len(leases), err)
					}
				}
			})
		}
		wg.Wait()
	})
}

// TestLeaseSerializable: the default isolation of the database may be
// serializable.
func TestLeaseSerializable(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		var name string
		e.scan(t, "SELECT current_database()", &name)
		e.exec(t, fmt.Sprintf("ALTER DATABASE %q SET default_transaction_isolation = serializable", name))
		var wg sync.WaitGroup
		granted := make(chan int64, 1000)
		for i := range 8 {
			s := newCoord(t, e.open(t), e.dialect, e.config()).Leases()
			wg.Go(func() {
				for range 30 {
					owner := fmt.Sprint("rival-", i)
					lease, err := s.Acquire(t.Context(), "race", 0, owner, time.Hour)
					if errors.Is(err, coord.ErrHeld) {
						continue
					}
					if err != nil {
						t.Errorf("Acquire = %v", err)
						continue
					}
					granted <- lease.Epoch
					if _, err := s.Renew(t.Context(), "race", []int{0}, owner, time.Hour); err != nil {
						t.Errorf("Renew = %v", err)
					}
					if ok, err := s.Release(t.Context(), "race", 0, owner); !ok || err != nil {
						t.Errorf("Release = %v, %v", ok, err)
					}
				}
			})
		}
		wg.Wait()
		close(granted)
		var epochs []int64
		for epoch := range granted {
			epochs = append(epochs, epoch)
		}
		slices.Sort(epochs)
		var want []int64
		for i := range epochs {
			want = append(want, int64(i+1))
		}
		if !reflect.DeepEqual(epochs, want) {
			t.Errorf("epochs = %v, want no gap and no repeat", epochs)
		}
	})
}

// TestLeaseRefusedWritesNothing: no WAL, no transaction id.
func TestLeaseRefusedWritesNothing(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		s := e.coord(t).Leases()
		grant(t, s, "a", time.Hour)
		refuse := func(n int) {
			for range n {
				if _, err := s.Acquire(t.Context(), "jobs", 3, "b", time.Hour); !errors.Is(err, coord.ErrHeld) {
					t.Fatalf("Acquire(b) = %v, want ErrHeld", err)
				}
			}
		}
		refuse(5)
		if wal := e.wal(t, func() { refuse(200) }); wal != 0 {
			t.Errorf("200 refusals wrote %d bytes of WAL, want 0", wal)
		}
	})
}

// wal is how many bytes of WAL the server writes during do, at its quietest of a
// few tries: others write some of their own.
func (e *env) wal(t testing.TB, do func()) (least int64) {
	t.Helper()
	for try := 0; try == 0 || try < 30 && least > 0; try++ {
		var before, after int64
		e.scan(t, "SELECT pg_current_wal_insert_lsn() - '0/0'", &before)
		do()
		e.scan(t, "SELECT pg_current_wal_insert_lsn() - '0/0'", &after)
		if try == 0 || after-before < least {
			least = after - before
		}
	}
	return least
}

// TestLeaseRenewalsStayHOT: 20 rounds over 10,000 partitions.
func TestLeaseRenewalsStayHOT(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		const partitions, rounds = 10000, 20
		db := e.open(t)
		c := newCoord(t, db, e.dialect, e.config())
		s := c.Leases()
		all := e.fillLeases(t, s, partitions)
		for range rounds {
			leases, err := s.Renew(t.Context(), "jobs", all, "o", time.Hour)
			if err != nil || len(leases) != partitions {
				t.Fatalf("Renew = %d leases, %v, want %d", len(leases), err, partitions)
			}
		}
		c.Close()
		db.Close() // A session reports its statistics when it ends.
		updates, hot := e.updates(t, "coord_lease", partitions*rounds)
		t.Logf("%d of %d updates were HOT", hot, updates)
		if hot*100 < updates*99 {
			t.Errorf("%d of %d updates were HOT, want 99 %%", hot, updates)
		}
	})
}

// fillLeases grants the first n partitions of jobs to o.
func (e *env) fillLeases(t testing.TB, s *coord.LeaseStore, n int) []int {
	t.Helper()
	if _, err := s.Acquire(t.Context(), "jobs", 0, "o", time.Hour); err != nil {
		t.Fatal(err)
	}
	series := "generate_series(1, %d)"
	if !e.postgres() {
		series = "json_each((WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d) SELECT json_group_array(i) FROM n))"
	}
	column := map[bool]string{true: "i", false: "value"}[e.postgres()]
	e.exec(t, fmt.Sprintf("INSERT INTO coord_lease SELECT group_name, %s, owner, epoch, attempt, dated, expires_at FROM coord_lease, "+series+" AS i", column, n-1))
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// updates reads the update counters of a table once they have seen want.
func (e *env) updates(t testing.TB, table string, want int64) (updates, hot int64) {
	t.Helper()
	query := "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = '" + table + "'"
	eventually(t, "the statistics arrive", func() bool {
		e.scan(t, query, &updates, &hot)
		return updates >= want
	})
	return updates, hot
}
