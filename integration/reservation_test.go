package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
	"pgregory.net/rapid"
)

// names is a type with the default table, and a namespace of it.
var names = coord.ReservationScope{Context: "context", Aggregate: "aggregate", Tenant: "t", Namespace: "names"}

// ref is an owner by its id.
func ref(id string) coord.AggregateRef { return coord.AggregateRef{Tenant: "t", ID: id} }

func reserve(t testing.TB, s *coord.ReservationStore, key, owner, hold string, ttl time.Duration) coord.Reservation {
	t.Helper()
	r, err := s.Reserve(t.Context(), names, key, ref(owner), hold, ttl)
	if err != nil {
		t.Errorf("Reserve(%s, %s) = %v", owner, hold, err)
	}
	return r
}

func confirm(t testing.TB, s *coord.ReservationStore, key, owner string, version int64, want coord.ConfirmOutcome) {
	t.Helper()
	if got, err := s.Confirm(t.Context(), names, key, ref(owner), version); got != want || err != nil {
		t.Errorf("Confirm(%s, %d) = %v, %v, want %v", owner, version, got, err, want)
	}
}

func release(t testing.TB, s *coord.ReservationStore, key, owner string, version int64, want bool) {
	t.Helper()
	if got, err := s.Release(t.Context(), names, key, ref(owner), version); got != want || err != nil {
		t.Errorf("Release(%s, %d) = %v, %v, want %v", owner, version, got, err, want)
	}
}

func abandon(t testing.TB, s *coord.ReservationStore, key, owner, hold string, want bool) {
	t.Helper()
	if got, err := s.Abandon(t.Context(), names, key, ref(owner), hold); got != want || err != nil {
		t.Errorf("Abandon(%s, %s) = %v, %v, want %v", owner, hold, got, err, want)
	}
}

// useReservations calls every operation once, in an order in which each succeeds.
func useReservations(t *testing.T, s *coord.ReservationStore) {
	t.Helper()
	reserve(t, s, "used", "o", "h", time.Hour)
	reserve(t, s, "used", "o", "i", time.Hour)
	abandon(t, s, "used", "o", "h", true)
	confirm(t, s, "used", "o", 1, coord.ConfirmedNow)
	if got := find(t, s, "used"); got != "o@1" {
		t.Fatalf("found %q, want o@1", got)
	}
	release(t, s, "used", "o", 1, true)
	confirm(t, s, "used", "o", 1, coord.ConfirmStale)
}

// show is a reservation in one word or three: "a@5 h i".
func show(r coord.Reservation) string {
	text := r.Owner.ID
	if r.Confirmed {
		text += fmt.Sprint("@", r.Version)
	}
	return strings.Join(append([]string{text}, r.Holds...), " ")
}

// find shows what is found, "" if nothing.
func find(t testing.TB, s *coord.ReservationStore, key string) string {
	t.Helper()
	r, found, err := s.Find(t.Context(), names, key)
	if err != nil {
		t.Fatalf("Find = %v", err)
	}
	if !found {
		return ""
	}
	if r.Scope != names || r.Key != key || r.Owner.Tenant != "t" {
		t.Errorf("Find = %+v, want it to name %v, %s and the tenant", r, names, key)
	}
	return show(r)
}

// reservationStates are the rows of the contract's table. A is the owner of the
// state and "h" its hold, which expires; versions are around 5.
var reservationStates = []struct {
	name string
	make func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) (expires time.Time)
	// What operations by a and by b answer before the hold expires, and from then on.
	live, expired map[string]cell
}{
	{"no row", func(*testing.T, *coord.ReservationStore, string, time.Duration) time.Time { return time.Time{} },
		map[string]cell{"a": {"a new", "NNN", "---", "-", "", ""}, "b": {"b new", "NNN", "---", "-", "", ""}}, nil},
	{"pending", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		return reserve(t, s, key, "a", "h", ttl).ExpiresAt
	},
		map[string]cell{"a": {"a h new", "NNN", "---", "+", "a h", ""}, "b": {"", "TTT", "---", "-", "a h", ""}},
		map[string]cell{"a": {"a new", "NNN", "---", "+", "", ""}, "b": {"b new", "NNN", "---", "-", "", ""}}},
	{"confirmed", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		r := reserve(t, s, key, "a", "h", ttl)
		confirm(t, s, key, "a", 5, coord.ConfirmedNow)
		return r.ExpiresAt
	},
		map[string]cell{"a": {"a@5 new", "BBN", "-++", "-", "a@5", ""}, "b": {"", "TTT", "---", "-", "a@5", ""}},
		map[string]cell{"a": {"a@5 new", "BBN", "-++", "-", "a@5", ""}, "b": {"", "TTT", "---", "-", "a@5", ""}}},
	{"confirmed, with a hold", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		confirm(t, s, key, "a", 5, coord.ConfirmedNow)
		return reserve(t, s, key, "a", "h", ttl).ExpiresAt
	},
		map[string]cell{"a": {"a@5 h new", "BBN", "-++", "+", "a@5 h", "a h"}, "b": {"", "TTT", "---", "-", "a@5 h", ""}},
		map[string]cell{"a": {"a@5 new", "BBN", "-++", "+", "a@5", ""}, "b": {"", "TTT", "---", "-", "a@5", ""}}},
	{"freed", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		confirm(t, s, key, "a", 5, coord.ConfirmedNow)
		release(t, s, key, "a", 5, true)
		return time.Time{}
	},
		map[string]cell{"a": {"a new", "SSN", "---", "-", "", ""}, "b": {"b new", "NNN", "---", "-", "", ""}}, nil},
	{"freed, and pending again", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		confirm(t, s, key, "a", 4, coord.ConfirmedNow)
		release(t, s, key, "a", 5, true)
		return reserve(t, s, key, "a", "h", ttl).ExpiresAt
	},
		map[string]cell{"a": {"a h new", "SSN", "---", "+", "a h", ""}, "b": {"", "TTT", "---", "-", "a h", ""}},
		map[string]cell{"a": {"a new", "SSN", "---", "+", "", ""}, "b": {"b new", "NNN", "---", "-", "", ""}}},
	{"freed under a hold", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		confirm(t, s, key, "a", 5, coord.ConfirmedNow)
		r := reserve(t, s, key, "a", "h", ttl)
		if r.ExpiresAt.IsZero() || show(r) != "a@5 h" {
			t.Fatalf("Reserve of what is confirmed = %+v, want it confirmed, the hold and its expiry", r)
		}
		release(t, s, key, "a", 5, true)
		return r.ExpiresAt
	},
		map[string]cell{"a": {"a h new", "SSN", "---", "+", "a h", ""}, "b": {"", "TTT", "---", "-", "a h", ""}}, nil},
	{"freed, and another's", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		confirm(t, s, key, "b", 5, coord.ConfirmedNow)
		release(t, s, key, "b", 5, true)
		return reserve(t, s, key, "a", "h", ttl).ExpiresAt
	},
		map[string]cell{"a": {"a h new", "NNN", "---", "+", "a h", ""}, "b": {"", "TTT", "---", "-", "a h", ""}},
		map[string]cell{"a": {"a new", "NNN", "---", "+", "", ""}, "b": {"b new", "SSN", "---", "-", "", ""}}},
	{"abandoned", func(t *testing.T, s *coord.ReservationStore, key string, ttl time.Duration) time.Time {
		reserve(t, s, key, "a", "h", time.Hour)
		abandon(t, s, key, "a", "h", true)
		return time.Time{}
	},
		map[string]cell{"a": {"a new", "NNN", "---", "-", "", ""}, "b": {"b new", "NNN", "---", "-", "", ""}}, nil},
}

// cell is what five operations by one owner answer in a state.
type cell struct {
	reserve string // what it is then; "" is ErrHeld
	confirm string // at 4, 5, 6: N now, B before, S stale, T taken
	release string // at 4, 5, 6: + true, - false
	abandon string // of h
	find    string // "" is none
	freed   string // what is found after a release
}

var outcomes = map[rune]coord.ConfirmOutcome{'N': coord.ConfirmedNow, 'B': coord.ConfirmedBefore, 'S': coord.ConfirmStale, 'T': coord.ConfirmTaken}

func TestReservationTable(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		keys := 0
		for _, state := range reservationStates {
			for _, when := range []string{"before", "at", "after"} {
				cells := state.live
				if when != "before" {
					cells = state.expired
				}
				for actor, want := range cells {
					// fresh makes the state for a new key, at the given side of its expiry.
					fresh := func(t *testing.T) (key string, expires time.Time) {
						t.Helper()
						keys++
						key, ttl := fmt.Sprint("key-", keys), time.Hour
						if when != "before" && e.clock == nil {
							ttl = 5 * time.Millisecond
						}
						expires = state.make(t, s, key, ttl)
						switch {
						case when == "at":
							e.pass(t, expires)
						case when == "after":
							e.pass(t, expires.Add(time.Microsecond))
						case e.clock != nil && !expires.IsZero():
							e.pass(t, expires.Add(-time.Microsecond))
						}
						return key, expires
					}
					t.Run(fmt.Sprint(state.name, "/", when, "/", actor), func(t *testing.T) { checkCell(t, e, s, actor, want, fresh) })
				}
			}
		}
	})
}

func checkCell(t *testing.T, e *env, s *coord.ReservationStore, actor string, want cell, fresh func(*testing.T) (string, time.Time)) {
	check := func(t *testing.T, what, key, want string) {
		t.Helper()
		if got := find(t, s, key); got != want {
			t.Errorf("found %q after %s, want %q", got, what, want)
		}
	}
	key, expires := fresh(t)
	check(t, "nothing", key, want.find)
	before := e.now(t)
	r, err := s.Reserve(t.Context(), names, key, ref(actor), "new", 2*time.Hour)
	if want.reserve == "" {
		owner, _, _ := strings.Cut(want.find, " ")
		owner, _, confirmed := strings.Cut(owner, "@")
		if confirmed {
			expires = time.Time{}
		}
		var held *coord.HeldError
		if !errors.Is(err, coord.ErrHeld) || !errors.As(err, &held) || held.Owner != "t/"+owner || !held.ExpiresAt.Equal(expires) {
			t.Errorf("Reserve = %+v, %+v, want ErrHeld by %s until %v", r, err, owner, expires)
		}
		check(t, "a refused Reserve", key, want.find)
	} else {
		if err != nil || show(r) != want.reserve || r.Scope != names || r.Key != key {
			t.Errorf("Reserve = %+v, %v, want %q", r, err, want.reserve)
		}
		if r.ExpiresAt.Before(before.Add(2*time.Hour)) || r.ExpiresAt.After(e.now(t).Add(2*time.Hour+e.tick())) {
			t.Errorf("ExpiresAt = %v, want two hours from %v", r.ExpiresAt, before)
		}
		check(t, "Reserve", key, want.reserve)
	}
	for i, letter := range want.confirm {
		key, _ := fresh(t)
		version := int64(4 + i)
		confirm(t, s, key, actor, version, outcomes[letter])
		after := want.find
		if letter == 'N' {
			after = fmt.Sprint(actor, "@", version)
		}
		check(t, "Confirm", key, after)
	}
	for i, sign := range want.release {
		key, _ := fresh(t)
		version := int64(4 + i)
		release(t, s, key, actor, version, sign == '+')
		after := want.find
		if sign == '+' {
			after = want.freed
		}
		check(t, "Release", key, after)
		release(t, s, key, actor, version, false)
		if sign == '+' {
			confirm(t, s, key, actor, version, coord.ConfirmStale)
			check(t, "a stale Confirm", key, after)
		}
	}
	key, _ = fresh(t)
	abandon(t, s, key, actor, "absent", false)
	check(t, "Abandon of what is not there", key, want.find)
	abandon(t, s, key, actor, "h", want.abandon == "+")
	after := want.find
	if want.abandon == "+" {
		after = strings.TrimSuffix(after, " h")
		if after == "a" {
			after = ""
		}
	}
	check(t, "Abandon", key, after)
	abandon(t, s, key, actor, "h", false)
}

// TestReservationHolds: each hold has an expiry of its own.
func TestReservationHolds(t *testing.T) {
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			e := newEnv(t, e, newClock())
			s := e.coord(t).Reservations()
			start := e.clock.Now()
			at := func(d time.Duration) { e.clock.set(start.Add(d)) }
			until := func(what string, d time.Duration) {
				t.Helper()
				r, found, err := s.Find(t.Context(), names, "k")
				if !found && what == "" && err == nil {
					return
				}
				if !found || show(r) != what || !r.ExpiresAt.Equal(map[bool]time.Time{true: start.Add(d)}[d > 0]) || err != nil {
					t.Fatalf("Find = %+v, %v, want %q until %v", r, err, what, start.Add(d))
				}
			}
			reserve(t, s, "k", "a", "z", time.Hour)
			until("a z", time.Hour)
			if r := reserve(t, s, "k", "a", "z", time.Minute); show(r) != "a z" || !r.ExpiresAt.Equal(start.Add(time.Hour)) {
				t.Errorf("Reserve for less time = %+v, want it not shortened", r)
			}
			reserve(t, s, "k", "a", "B", time.Minute)
			until("a B z", time.Hour)
			abandon(t, s, "k", "a", "z", true)
			until("a B", time.Minute)
			reserve(t, s, "k", "a", "z", 2*time.Minute)
			at(time.Minute)
			until("a z", 2*time.Minute)
			if r := reserve(t, s, "k", "a", "c", time.Second); show(r) != "a c z" || !r.ExpiresAt.Equal(start.Add(2*time.Minute)) {
				t.Errorf("Reserve = %+v, want what has expired gone, and the last expiry", r)
			}
			abandon(t, s, "k", "a", "z", true)
			at(time.Minute + time.Second)
			until("", 0)
			reserve(t, s, "k", "b", "h", time.Minute)
			until("b h", 2*time.Minute+time.Second)
			// On a confirmed key, and after it.
			confirm(t, s, "k", "b", 1, coord.ConfirmedNow)
			until("b@1", 0)
			reserve(t, s, "k", "b", "long", time.Hour)
			reserve(t, s, "k", "b", "short", time.Second)
			at(2 * time.Minute)
			release(t, s, "k", "b", 1, true)
			until("b long", time.Minute+time.Second+time.Hour)
			at(3 * time.Hour)
			until("", 0)
			reserve(t, s, "k", "c", "h", time.Minute)
		})
	}
}

// TestReservationRace: of many owners at once one wins, and the others are told who.
func TestReservationRace(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		const owners = 64
		keys := 200
		if e.pooler || underRace && !e.postgres() {
			keys = 20
		}
		e.db.SetMaxOpenConns(16) // The server has not many.
		e.db.SetMaxIdleConns(16)
		s := e.coord(t).Reservations()
		var nameless atomic.Int64
		for key := range keys {
			key := fmt.Sprint("key-", key)
			var wg sync.WaitGroup
			results := make([]error, owners)
			start := make(chan struct{})
			for i := range owners {
				wg.Go(func() {
					<-start
					_, results[i] = s.Reserve(t.Context(), names, key, ref(fmt.Sprint(i)), "h", time.Hour)
				})
			}
			close(start)
			wg.Wait()
			winner := slices.Index(results, nil)
			if got, want := find(t, s, key), fmt.Sprint(winner, " h"); winner < 0 || got != want {
				t.Fatalf("found %q, want %q", got, want)
			}
			for i, err := range results {
				var held *coord.HeldError
				switch {
				case i == winner:
				case !errors.Is(err, coord.ErrHeld) || !errors.As(err, &held):
					t.Errorf("Reserve(%d) = %v, want ErrHeld", i, err)
				case held.Owner == "":
					nameless.Add(1)
				case held.Owner != fmt.Sprint("t/", winner) || held.ExpiresAt.IsZero():
					t.Errorf("Reserve(%d) = %v, want it held by t/%d", i, err, winner)
				}
			}
		}
		if n := nameless.Load(); n > 0 {
			t.Errorf("%d losers were not told who won", n) // The winner never goes, so it is always visible.
		}
	})
}

// TestAbandonRace: a new hold is never lost to an Abandon of another, and without
// holds nothing stays.
func TestAbandonRace(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		rounds := 2000
		if e.pooler {
			rounds = 200
		}
		e.db.SetMaxIdleConns(4)
		s := e.coord(t).Reservations()
		for round := range rounds {
			key := fmt.Sprint("key-", round)
			reserve(t, s, key, "a", "first", time.Hour)
			var wg sync.WaitGroup
			wg.Go(func() { abandon(t, s, key, "a", "first", true) })
			switch round % 3 {
			case 0: // A new hold of the same owner.
				reserve(t, s, key, "a", "second", time.Hour)
				wg.Wait()
				if got := find(t, s, key); got != "a second" {
					t.Fatalf("round %d: found %q, want the second hold", round, got)
				}
			case 1: // The last but one goes at the same time.
				reserve(t, s, key, "a", "second", time.Hour)
				abandon(t, s, key, "a", "second", true)
				wg.Wait()
				if got := find(t, s, key); got != "" {
					t.Fatalf("round %d: found %q, want nothing without holds", round, got)
				}
				reserve(t, s, key, "b", "h", time.Hour)
			case 2: // Another owner.
				_, err := s.Reserve(t.Context(), names, key, ref("b"), "second", time.Hour)
				wg.Wait()
				want := "b second"
				if errors.Is(err, coord.ErrHeld) {
					want, err = "", nil
				}
				if got := find(t, s, key); got != want || err != nil {
					t.Fatalf("round %d: found %q, %v, want %q", round, got, err, want)
				}
			}
		}
	})
}

// TestReservationModel: whatever is done in whatever order, the store does what a
// plain model does, and replays of what was processed change nothing.
func TestReservationModel(t *testing.T) {
	for _, e := range engines {
		if e.pooler || e.name == "sqlite-file" {
			continue // They differ in transport alone.
		}
		t.Run(e.name, func(t *testing.T) {
			e := newEnv(t, e, newClock())
			s := e.coord(t).Reservations()
			runs := 0
			rapid.Check(t, func(r *rapid.T) {
				runs++
				m := &reservationModel{t: r, s: s, clock: e.clock, key: fmt.Sprint("key-", runs)}
				m.row.released = map[string]int64{}
				r.Repeat(map[string]func(*rapid.T){
					"reserve": m.reserve, "confirm": m.confirm, "release": m.release, "abandon": m.abandon,
					"wait": m.wait, "replay": m.replay, "": m.check,
				})
			})
		})
	}
}

// reservationModel is one key, in the store and in memory.
type reservationModel struct {
	t     *rapid.T
	s     *coord.ReservationStore
	clock *clock
	key   string
	row   struct {
		owner     string
		confirmed bool
		version   int64
		holds     map[string]time.Time
		released  map[string]int64 // by owner
	}
	processed []func(*rapid.T) // the replays
}

var (
	someOwner   = rapid.SampledFrom([]string{"a", "b", "c"})
	someHold    = rapid.SampledFrom([]string{"x", "y", "z"})
	someVersion = rapid.Int64Range(0, 6)
)

func (m *reservationModel) live() bool {
	for _, expires := range m.row.holds {
		if expires.After(m.clock.Now()) {
			return true
		}
	}
	return m.row.confirmed
}

func (m *reservationModel) dropExpired() {
	for hold, expires := range m.row.holds {
		if !expires.After(m.clock.Now()) {
			delete(m.row.holds, hold)
		}
	}
}

func (m *reservationModel) found() string {
	if !m.live() {
		return ""
	}
	r := coord.Reservation{Owner: ref(m.row.owner), Confirmed: m.row.confirmed, Version: m.row.version}
	for hold, expires := range m.row.holds {
		if expires.After(m.clock.Now()) {
			r.Holds = append(r.Holds, hold)
		}
	}
	slices.Sort(r.Holds)
	return show(r)
}

func (m *reservationModel) check(r *rapid.T) {
	got, found, err := m.s.Find(r.Context(), names, m.key)
	text := ""
	if found {
		text = show(got)
	}
	if want := m.found(); text != want || err != nil {
		r.Fatalf("found %q, %v, want %q", text, err, want)
	}
	var last time.Time
	for _, expires := range m.row.holds {
		if found && expires.After(m.clock.Now()) && expires.After(last) {
			last = expires
		}
	}
	if !got.ExpiresAt.Equal(last) {
		r.Fatalf("ExpiresAt = %v, want %v", got.ExpiresAt, last)
	}
}

func (m *reservationModel) wait(r *rapid.T) {
	m.clock.set(m.clock.Now().Add(time.Duration(rapid.IntRange(0, 4).Draw(r, "seconds")) * time.Second))
}

func (m *reservationModel) reserve(r *rapid.T) {
	owner, hold := someOwner.Draw(r, "owner"), someHold.Draw(r, "hold")
	ttl := time.Duration(rapid.IntRange(1, 5).Draw(r, "ttl")) * time.Second
	_, err := m.s.Reserve(r.Context(), names, m.key, ref(owner), hold, ttl)
	if m.live() && m.row.owner != owner {
		if !errors.Is(err, coord.ErrHeld) {
			r.Fatalf("Reserve(%s) = %v, want ErrHeld", owner, err)
		}
		return
	}
	if err != nil {
		r.Fatalf("Reserve(%s) = %v", owner, err)
	}
	if m.row.owner != owner {
		m.row.holds = nil
	}
	if m.row.holds == nil {
		m.row.holds = map[string]time.Time{}
	}
	m.dropExpired()
	if expires := m.clock.Now().Add(ttl); m.row.holds[hold].Before(expires) {
		m.row.holds[hold] = expires
	}
	m.row.owner = owner
}

func (m *reservationModel) confirm(r *rapid.T) {
	owner, version := someOwner.Draw(r, "owner"), someVersion.Draw(r, "version")
	want := coord.ConfirmedNow
	freed, was := m.row.released[owner]
	switch {
	case m.live() && m.row.owner != owner:
		want = coord.ConfirmTaken
	case m.row.confirmed && m.row.version >= version:
		want = coord.ConfirmedBefore
	case !m.row.confirmed && was && freed >= version:
		want = coord.ConfirmStale
	}
	if got, err := m.s.Confirm(r.Context(), names, m.key, ref(owner), version); got != want || err != nil {
		r.Fatalf("Confirm(%s, %d) = %v, %v, want %v", owner, version, got, err, want)
	}
	if want == coord.ConfirmedNow {
		m.row.owner, m.row.confirmed, m.row.version, m.row.holds = owner, true, version, nil
	}
	if want != coord.ConfirmTaken {
		m.processed = append(m.processed, func(r *rapid.T) {
			got, err := m.s.Confirm(r.Context(), names, m.key, ref(owner), version)
			if got == coord.ConfirmedNow || err != nil {
				r.Fatalf("Confirm(%s, %d) again = %v, %v, want it known", owner, version, got, err)
			}
		})
	}
}

func (m *reservationModel) release(r *rapid.T) {
	owner, version := someOwner.Draw(r, "owner"), someVersion.Draw(r, "version")
	want := m.row.confirmed && m.row.owner == owner && version >= m.row.version
	if got, err := m.s.Release(r.Context(), names, m.key, ref(owner), version); got != want || err != nil {
		r.Fatalf("Release(%s, %d) = %v, %v, want %v", owner, version, got, err, want)
	}
	if !want {
		return
	}
	m.dropExpired()
	m.row.confirmed, m.row.version, m.row.released[owner] = false, 0, version
	m.processed = append(m.processed, func(r *rapid.T) {
		if got, err := m.s.Release(r.Context(), names, m.key, ref(owner), version); got || err != nil {
			r.Fatalf("Release(%s, %d) again = %v, %v, want false", owner, version, got, err)
		}
	})
}

func (m *reservationModel) abandon(r *rapid.T) {
	owner, hold := someOwner.Draw(r, "owner"), someHold.Draw(r, "hold")
	_, want := m.row.holds[hold]
	want = want && m.row.owner == owner
	if got, err := m.s.Abandon(r.Context(), names, m.key, ref(owner), hold); got != want || err != nil {
		r.Fatalf("Abandon(%s, %s) = %v, %v, want %v", owner, hold, got, err, want)
	}
	if want {
		delete(m.row.holds, hold)
	}
}

// replay sends what was processed before once more; check sees that it changed
// nothing.
func (m *reservationModel) replay(r *rapid.T) {
	if len(m.processed) > 0 {
		rapid.SampledFrom(m.processed).Draw(r, "replay")(r)
	}
}

// oddStrings are what quoting gets wrong.
var oddStrings = []string{`'`, `"`, `''`, `a"b`, `,`, `a,b`, `{`, `}`, `{}`, `{"a"}`, `[]`, `["a",1]`, `\`, `\\`, `a\"b`, `\u0041`, `\x41`, `NULL`, `null`, ` `, ` a `,
	"\n", "\t\r", "\x01", "\x7f", `%s`, `$1`, `?1`, `--`, `/* */`, `;`, `1`, `1.0`, `true`, "😀", "👩‍👩‍👧", "é", "e\u0301", "É", "ß", "\u2028", "\ufeff", "\U0010ffff", `<>&`, "a", "A"}

// TestReservationHoldsComeBack byte for byte, in byte order.
func TestReservationHoldsComeBack(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		holds := slices.Clone(oddStrings)
		entries := 1000 // Each one reads and writes the list of all.
		if underRace && !e.postgres() {
			entries = 100
		}
		for i := range entries - len(holds) {
			holds = append(holds, fmt.Sprint("hold-", i))
		}
		var last coord.Reservation
		for _, hold := range holds {
			for range map[bool]int{true: 2, false: 1}[len(hold) < 3] { // Once, however often.
				last = reserve(t, s, "k", "a", hold, time.Hour)
			}
		}
		slices.Sort(holds)
		r, found, err := s.Find(t.Context(), names, "k")
		if !slices.Equal(r.Holds, holds) || !slices.Equal(last.Holds, holds) || !found || err != nil {
			t.Fatalf("Find = %q, %v, Reserve = %q, want %q", r.Holds, err, last.Holds, holds)
		}
		for i, hold := range holds[:len(oddStrings)] {
			abandon(t, s, "k", "a", hold, true)
			if r, _, err := s.Find(t.Context(), names, "k"); !slices.Equal(r.Holds, holds[i+1:]) || err != nil {
				t.Fatalf("after Abandon(%q): Find = %q, %v, want %q", hold, r.Holds, err, holds[i+1:])
			}
		}
		confirm(t, s, "k", "a", 0, coord.ConfirmedNow)
		for _, hold := range oddStrings {
			reserve(t, s, "k", "a", hold, time.Hour)
		}
		release(t, s, "k", "a", 0, true)
		want := slices.Sorted(slices.Values(oddStrings))
		if r, _, err := s.Find(t.Context(), names, "k"); !slices.Equal(r.Holds, want) || err != nil {
			t.Fatalf("after Release: Find = %q, %v, want %q", r.Holds, err, want)
		}
	})
}

// TestReservationKeysAreBytes: keys, namespaces, tenants and owners that differ at
// all are different.
func TestReservationKeysAreBytes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		ctx := t.Context()
		texts := append([]string{""}, oddStrings...)
		for i, text := range texts {
			owner, other := coord.AggregateRef{Tenant: text, ID: fmt.Sprint(i)}, coord.AggregateRef{Tenant: "t", ID: text + "x"}
			for _, scope := range []coord.ReservationScope{
				{Context: names.Context, Aggregate: names.Aggregate, Tenant: text, Namespace: "fixed"},
				{Context: names.Context, Aggregate: names.Aggregate, Tenant: "fixed", Namespace: text},
			} {
				for _, key := range []string{"k", text + "k"} {
					if r, err := s.Reserve(ctx, scope, key, owner, "h", time.Hour); r.Scope != scope || r.Key != key || r.Owner != owner || err != nil {
						t.Fatalf("Reserve(%q, %q) = %+v, %v", scope, key, r, err)
					}
					var held *coord.HeldError
					if _, err := s.Reserve(ctx, scope, key, other, "h", time.Hour); !errors.As(err, &held) || held.Owner != text+"/"+owner.ID {
						t.Fatalf("Reserve(%q, %q) by another = %v, want it held by %s/%s", scope, key, err, text, owner.ID)
					}
				}
			}
			// Each owner's releases are its own.
			if outcome, err := s.Confirm(ctx, names, "shared", other, 3); outcome != coord.ConfirmedNow || err != nil {
				t.Fatalf("Confirm by %q = %v, %v", other, outcome, err)
			}
			if ok, err := s.Release(ctx, names, "shared", other, 3); !ok || err != nil {
				t.Fatalf("Release by %q = %v, %v", other, ok, err)
			}
		}
		for _, text := range texts {
			other := coord.AggregateRef{Tenant: "t", ID: text + "x"}
			if outcome, err := s.Confirm(ctx, names, "shared", other, 3); outcome != coord.ConfirmStale || err != nil {
				t.Fatalf("Confirm by %q again = %v, %v, want it stale", other, outcome, err)
			}
		}
		long := names
		long.Tenant, long.Namespace = randomText(800), randomText(800)
		key := randomText(1000)
		if _, err := s.Reserve(ctx, long, key, ref("a"), "h", time.Hour); err != nil {
			t.Errorf("Reserve with 2,600 bytes of key = %v", err)
		}
		if _, err := s.Reserve(ctx, long, key+"x", ref("a"), "h", time.Hour); !errors.Is(err, coord.ErrInvalid) {
			t.Errorf("Reserve with 2,601 bytes of key = %v, want ErrInvalid", err)
		}
	})
}

// TestReservationOwnersHaveTenants: the same id in two tenants is two owners.
func TestReservationOwnersHaveTenants(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s, ctx := e.coord(t).Reservations(), t.Context()
		mine, other := coord.AggregateRef{Tenant: "one", ID: "x"}, coord.AggregateRef{Tenant: "two", ID: "x"}
		refused := func() {
			t.Helper()
			_, reserved := s.Reserve(ctx, names, "k", other, "h", time.Hour)
			outcome, confirmed := s.Confirm(ctx, names, "k", other, 9)
			abandoned, abandon := s.Abandon(ctx, names, "k", other, "h")
			released, release := s.Release(ctx, names, "k", other, 9)
			var held *coord.HeldError
			if err := errors.Join(confirmed, abandon, release); !errors.As(reserved, &held) || held.Owner != "one/x" || outcome != coord.ConfirmTaken || abandoned || released || err != nil {
				t.Errorf("by the other tenant: Reserve = %v, Confirm = %v, Abandon = %v, Release = %v, %v", reserved, outcome, abandoned, released, err)
			}
		}
		if _, err := s.Reserve(ctx, names, "k", mine, "h", time.Hour); err != nil {
			t.Fatal(err)
		}
		refused()
		if outcome, err := s.Confirm(ctx, names, "k", mine, 3); outcome != coord.ConfirmedNow || err != nil {
			t.Fatal(outcome, err)
		}
		refused()
		if ok, err := s.Release(ctx, names, "k", mine, 3); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if outcome, err := s.Confirm(ctx, names, "k", other, 3); outcome != coord.ConfirmedNow || err != nil {
			t.Errorf("Confirm by the other tenant = %v, %v, want now: the release was not its own", outcome, err)
		}
	})
}

// randomText can't be compressed: the index takes it as it is.
func randomText(n int) string {
	text := make([]byte, n)
	for i := range text {
		text[i] = byte('!' + rand.IntN('~'-'!'))
	}
	return string(text)
}

// TestReservationRefusedWritesNothing: no WAL, no transaction id.
func TestReservationRefusedWritesNothing(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		reserve(t, s, "pending", "a", "h", time.Hour)
		confirm(t, s, "confirmed", "a", 5, coord.ConfirmedNow)
		confirm(t, s, "freed", "a", 5, coord.ConfirmedNow)
		release(t, s, "freed", "a", 5, true)
		for what, refuse := range map[string]func(){
			"Reserve": func() {
				for _, key := range []string{"pending", "confirmed"} {
					if _, err := s.Reserve(t.Context(), names, key, ref("b"), "h", time.Hour); !errors.Is(err, coord.ErrHeld) {
						t.Fatalf("Reserve(b) = %v, want ErrHeld", err)
					}
				}
			},
			"Confirm": func() {
				confirm(t, s, "pending", "b", 7, coord.ConfirmTaken)
				confirm(t, s, "confirmed", "a", 5, coord.ConfirmedBefore)
				confirm(t, s, "freed", "a", 5, coord.ConfirmStale)
			},
			"Release and Abandon": func() {
				release(t, s, "confirmed", "b", 7, false)
				release(t, s, "confirmed", "a", 4, false)
				abandon(t, s, "pending", "b", "h", false)
				abandon(t, s, "pending", "a", "absent", false)
			},
		} {
			for range 5 {
				refuse()
			}
			wal := e.wal(t, func() {
				for range 50 {
					refuse()
				}
			})
			if wal != 0 {
				t.Errorf("refusals of %s wrote %d bytes of WAL, want 0", what, wal)
			}
		}
	})
}

// waiting is whether a statement waits for a row.
const waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"

// TestReservationWaits: what waited for the row judges expiry when it has it.
func TestReservationWaits(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		// behind runs do while another transaction has the row, until reached.
		behind := func(reached time.Time, do func()) {
			t.Helper()
			tx, err := e.db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			if _, err := tx.Exec("SELECT FROM coord_reservation__context__aggregate FOR UPDATE"); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			wg.Go(do)
			eventually(t, "the operation waits for the row", func() (waits bool) { e.scan(t, waiting, &waits); return waits })
			e.pass(t, reached)
			tx.Rollback() // The row was merely locked.
			wg.Wait()
		}
		confirm(t, s, "k", "a", 5, coord.ConfirmedNow)
		hold := reserve(t, s, "k", "a", "h", e.ttl())
		behind(hold.ExpiresAt, func() { release(t, s, "k", "a", 5, true) })
		if got := find(t, s, "k"); got != "" {
			t.Errorf("found %q after a Release that waited past the hold's expiry, want it freed", got)
		}
		reserve(t, s, "k", "a", "h", e.ttl())
		var freed time.Time
		var got coord.Reservation
		behind(e.now(t), func() {
			freed = e.now(t)
			got = reserve(t, s, "k", "a", "i", time.Hour)
		})
		if got.ExpiresAt.Before(freed.Add(time.Hour)) {
			t.Errorf("Reserve that waited = %+v, want a full hour", got)
		}
	})
}

// TestReservationRivals: what waits for a rival's transaction is judged by what that
// has made of the key, although a look before had nothing against it.
func TestReservationRivals(t *testing.T) {
	refused := func(t *testing.T, s *coord.ReservationStore, key string) {
		var held *coord.HeldError
		if _, err := s.Reserve(t.Context(), names, key, ref("c"), "h", time.Hour); !errors.As(err, &held) || held.Owner != "t/b" {
			t.Errorf("Reserve = %v, want it held by t/b", err)
		}
	}
	confirms := func(version int64, want coord.ConfirmOutcome) func(*testing.T, *coord.ReservationStore, string) {
		return func(t *testing.T, s *coord.ReservationStore, key string) { confirm(t, s, key, "c", version, want) }
	}
	for _, test := range []struct {
		name  string
		rival func(t *testing.T, s *coord.ReservationStore, key string) // in its transaction
		then  []func(t *testing.T, s *coord.ReservationStore, key string)
		want  string
	}{
		{"reserves", func(t *testing.T, s *coord.ReservationStore, key string) { reserve(t, s, key, "b", "h", time.Hour) },
			[]func(*testing.T, *coord.ReservationStore, string){refused, confirms(1, coord.ConfirmTaken)}, "b h"},
		{"confirms", func(t *testing.T, s *coord.ReservationStore, key string) {
			confirm(t, s, key, "b", 1, coord.ConfirmedNow)
		},
			[]func(*testing.T, *coord.ReservationStore, string){refused, confirms(1, coord.ConfirmTaken)}, "b@1"},
		{"confirms for the same owner", func(t *testing.T, s *coord.ReservationStore, key string) {
			confirm(t, s, key, "c", 5, coord.ConfirmedNow)
		},
			[]func(*testing.T, *coord.ReservationStore, string){confirms(4, coord.ConfirmedBefore), confirms(5, coord.ConfirmedBefore)}, "c@5"},
		{"confirms and releases", func(t *testing.T, s *coord.ReservationStore, key string) {
			confirm(t, s, key, "c", 4, coord.ConfirmedNow)
			release(t, s, key, "c", 5, true)
		}, []func(*testing.T, *coord.ReservationStore, string){confirms(4, coord.ConfirmStale), confirms(5, coord.ConfirmStale)}, ""},
		{"abandons", func(t *testing.T, s *coord.ReservationStore, key string) { abandon(t, s, key, "a", "h", true) },
			[]func(*testing.T, *coord.ReservationStore, string){confirms(1, coord.ConfirmedNow)}, "c@1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachPostgres(t, func(t *testing.T, e *env) {
				s := e.coord(t).Reservations()
				for _, fresh := range []bool{false, true} {
					key := fmt.Sprint("key-", fresh)
					if fresh && test.name == "abandons" {
						continue
					}
					if !fresh {
						e.pass(t, reserve(t, s, key, "a", "h", 2*time.Millisecond).ExpiresAt)
					}
					err := inTx(t, e.db, nil, func(tx *sql.Tx) error {
						test.rival(t, s.WithTx(tx), key)
						var wg sync.WaitGroup
						for _, then := range test.then {
							other := e.coord(t).Reservations() // Callers of one Coord queue for the key.
							wg.Go(func() { then(t, other, key) })
						}
						eventually(t, "all wait for the rival", func() bool {
							var waiting int
							e.scan(t, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()", &waiting)
							return waiting == len(test.then)
						})
						defer wg.Wait()
						return tx.Commit()
					})
					if err != nil && !errors.Is(err, sql.ErrTxDone) {
						t.Fatal(err)
					}
					if got := find(t, s, key); got != test.want {
						t.Errorf("found %q, want %q", got, test.want)
					}
				}
			})
		})
	}
}

// TestReservationSerializable: the default isolation of the database may be
// serializable.
func TestReservationSerializable(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		var name string
		e.scan(t, "SELECT current_database()", &name)
		e.exec(t, fmt.Sprintf("ALTER DATABASE %q SET default_transaction_isolation = serializable", name))
		var wg sync.WaitGroup
		for i := range 8 {
			s := newCoord(t, e.open(t), e.dialect, e.config()).Reservations()
			wg.Go(func() {
				for version := range int64(30) {
					owner := fmt.Sprint("rival-", i)
					_, err := s.Reserve(t.Context(), names, "k", ref(owner), "h", time.Hour)
					if errors.Is(err, coord.ErrHeld) {
						continue
					}
					if err != nil {
						t.Errorf("Reserve = %v", err)
						continue
					}
					if version%3 == 0 {
						abandon(t, s, "k", owner, "h", true)
						continue
					}
					confirm(t, s, "k", owner, version, coord.ConfirmedNow)
					release(t, s, "k", owner, version, true)
				}
			})
		}
		wg.Wait()
		if got := find(t, e.coord(t).Reservations(), "k"); got != "" {
			t.Errorf("found %q, want nothing", got)
		}
	})
}

// TestReservationWithTx: what is done in a transaction is done with it.
func TestReservationWithTx(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		reserve(t, s, "first", "a", "h", time.Hour) // Makes the table.
		all := func(key string) func(*sql.Tx) error {
			return func(tx *sql.Tx) error {
				in := s.WithTx(tx)
				reserve(t, in, key, "a", "h", time.Hour)
				reserve(t, in, key, "a", "i", time.Hour)
				abandon(t, in, key, "a", "h", true)
				if _, err := in.Reserve(t.Context(), names, key, ref("b"), "h", time.Hour); !errors.Is(err, coord.ErrHeld) {
					t.Errorf("Reserve(b) in the transaction = %v, want ErrHeld", err)
				}
				confirm(t, in, key, "b", 1, coord.ConfirmTaken)
				confirm(t, in, key, "a", 1, coord.ConfirmedNow)
				confirm(t, in, key, "a", 1, coord.ConfirmedBefore)
				release(t, in, key, "a", 1, true)
				confirm(t, in, key, "a", 1, coord.ConfirmStale)
				if got := find(t, in, key); got != "" {
					t.Errorf("found %q in the transaction, want it freed", got)
				}
				confirm(t, in, key, "a", 2, coord.ConfirmedNow)
				if got := find(t, in, key); got != "a@2" {
					t.Errorf("found %q in the transaction, want a@2", got)
				}
				return nil
			}
		}
		rollback := errors.New("rolled back")
		if err := inTx(t, e.db, nil, func(tx *sql.Tx) error { all("k")(tx); return rollback }); !errors.Is(err, rollback) {
			t.Fatal(err)
		}
		if got := find(t, s, "k"); got != "" {
			t.Errorf("found %q after the rollback, want nothing", got)
		}
		reserve(t, s, "k", "b", "h", time.Hour)
		abandon(t, s, "k", "b", "h", true)
		if err := inTx(t, e.db, nil, all("k")); err != nil {
			t.Fatal(err)
		}
		if got := find(t, s, "k"); got != "a@2" {
			t.Errorf("found %q after the commit, want a@2", got)
		}
		for name, tx := range map[string]coord.DBTX{"nil": nil, "nil *sql.Tx": (*sql.Tx)(nil), "*sql.DB": e.db} {
			if _, _, err := s.WithTx(tx).Find(t.Context(), names, "k"); !errors.Is(err, coord.ErrInvalid) {
				t.Errorf("Find in %s = %v, want ErrInvalid", name, err)
			}
		}
	})
}

// TestReservationWithTxBlocks: a rival of a reservation that is not committed yet
// waits for it, and is then refused, or has the key if that was rolled back.
func TestReservationWithTxBlocks(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		for _, commit := range []bool{true, false} {
			key := fmt.Sprint("key-", commit)
			reserve(t, s, "first", "a", "h", time.Hour)
			tx, err := e.db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			reserve(t, s.WithTx(tx), key, "a", "h", time.Hour)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if _, err := s.Reserve(ctx, names, key, ref("c"), "h", time.Hour); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, coord.ErrHeld) {
				t.Errorf("Reserve that waited = %v, want its deadline", err)
			}
			rival := make(chan error, 1)
			go func() { _, err := s.Reserve(t.Context(), names, key, ref("b"), "h", time.Hour); rival <- err }()
			select {
			case err := <-rival:
				t.Fatalf("Reserve by a rival of an open transaction = %v, want it to wait", err)
			case <-time.After(50 * time.Millisecond):
			}
			want := "b h"
			if commit {
				want = "a h"
				err = tx.Commit()
			} else {
				err = tx.Rollback()
			}
			if err != nil {
				t.Fatal(err)
			}
			// The one that left may have had its turn for a moment.
			if err := <-rival; commit && !errors.Is(err, coord.ErrHeld) || !commit && err != nil && !errors.Is(err, coord.ErrHeld) {
				t.Errorf("committed %v: the rival = %v", commit, err)
			} else if !commit && err != nil {
				eventually(t, "what was granted unseen is taken back", func() bool { return find(t, s, key) == "" })
				reserve(t, s, key, "b", "h", time.Hour)
			}
			if got := find(t, s, key); got != want {
				t.Errorf("committed %v: found %q, want %q", commit, got, want)
			}
		}
	})
}

// TestReservationFirstUseInTx: no table is made in the caller's transaction.
func TestReservationFirstUseInTx(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		for _, single := range []bool{false, true} {
			db := e.open(t)
			if single {
				db.SetMaxOpenConns(1)
			}
			c := newCoord(t, db, e.dialect, e.config())
			s, scope := c.Reservations(), coord.ReservationScope{Context: "context", Aggregate: map[bool]string{false: "many", true: "one"}[single]}
			confirmed := func(s *coord.ReservationStore) error {
				_, err := s.Confirm(t.Context(), scope, "k", ref("a"), 1)
				return err
			}
			rollback := errors.New("rolled back")
			err := inTx(t, db, nil, func(tx *sql.Tx) error {
				return errors.Join(confirmed(s.WithTx(tx)), rollback)
			})
			if single || !e.postgres() {
				if !errors.Is(err, coord.ErrFormat) {
					t.Errorf("single %v: the first use in a transaction = %v, want ErrFormat", single, err)
				}
				if err := c.Migrate(t.Context(), scope); err != nil {
					t.Fatal(err)
				}
			}
			// It is there, whatever became of the transaction. Another process finds it too.
			for _, c := range []*coord.Coord{c, newCoord(t, db, e.dialect, e.config())} {
				err := inTx(t, db, nil, func(tx *sql.Tx) error { return confirmed(c.Reservations().WithTx(tx)) })
				if err != nil {
					t.Errorf("single %v: Confirm in a transaction = %v", single, err)
				}
			}
			r, found, err := s.Find(t.Context(), scope, "k")
			if !found || err != nil || !r.Confirmed {
				t.Errorf("single %v: Find = %+v, %v, %v", single, r, found, err)
			}
		}
	})
}

// TestReserveUnseen: of a reservation that is granted after its caller has left, the
// hold goes again, but not one that somebody has been told of.
func TestReserveUnseen(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		s := e.coord(t).Reservations()
		reserve(t, s, "k", "a", "known", time.Hour)
		holds := map[string]time.Duration{"known": 5 * time.Hour, "unseen": 2 * time.Hour, "retried": 2 * time.Hour}
		left := map[string]*coord.Coord{} // A Coord has one Reserve of a key in flight at most.
		for hold := range holds {
			left[hold] = newCoord(t, e.open(t), e.dialect, e.config())
			find(t, left[hold].Reservations(), "k") // Else it would still look for the table when its caller leaves.
		}
		tx, err := e.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		reserve(t, s.WithTx(tx), "k", "a", "never", time.Hour) // The row is locked.
		var wg, told sync.WaitGroup
		for hold, ttl := range holds {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second) // Time enough for it to be sent.
				defer cancel()
				if _, err := left[hold].Reservations().Reserve(ctx, names, "k", ref("a"), hold, ttl); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Reserve(%s) = %v, want its deadline", hold, err)
				}
			})
		}
		wg.Wait()
		told.Go(func() { reserve(t, s, "k", "a", "retried", 2*time.Hour) })
		tx.Rollback()
		told.Wait()
		eventually(t, "what was granted unseen is removed", func() bool {
			r, _, err := s.Find(t.Context(), names, "k")
			landed := r.ExpiresAt.After(e.now(t).Add(4 * time.Hour)) // "known" at least
			return err == nil && landed && show(r) == "a known retried"
		})
		for _, c := range left {
			c.Close() // It waits for what is still to be undone.
		}
		if got := find(t, s, "k"); got != "a known retried" {
			t.Errorf("found %q, want what was told of", got)
		}
	})
}

// TestReservationPurge: what has been free for longer than the age goes, of every
// type that there is.
func TestReservationPurge(t *testing.T) {
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			e := newEnv(t, e, newClock())
			s := e.coord(t).Reservations()
			start := e.clock.Now()
			reserve(t, s, "expired", "a", "h", time.Minute)
			reserve(t, s, "expires later", "a", "h", time.Hour)
			confirm(t, s, "confirmed", "a", 1, coord.ConfirmedNow)
			reserve(t, s, "confirmed", "a", "h", time.Minute)
			for _, key := range []string{"freed", "pending"} {
				confirm(t, s, key, "a", 1, coord.ConfirmedNow)
				release(t, s, key, "a", 1, true)
			}
			reserve(t, s, "pending", "a", "h", time.Minute)
			purge := func(age time.Duration, want int64) {
				t.Helper()
				// Of a Coord that has used no type.
				if n, err := newCoord(t, e.db, e.dialect, e.config()).Purge(t.Context(), age); n != want || err != nil {
					t.Errorf("Purge(%v) = %d, %v, want %d", age, n, err, want)
				}
			}
			purge(0, 1) // The release is as old as nothing.
			confirm(t, s, "freed", "a", 1, coord.ConfirmedNow)
			release(t, s, "freed", "a", 1, true)
			for _, key := range []string{"remembered", "forgotten"} {
				confirm(t, s, key, "a", 1, coord.ConfirmedNow)
				release(t, s, key, "a", 1, true)
				confirm(t, s, key, "b", 1, coord.ConfirmedNow)
			}
			e.clock.set(start.Add(time.Hour - time.Microsecond))
			purge(time.Hour, 0)
			confirm(t, s, "freed", "a", 1, coord.ConfirmStale)
			release(t, s, "remembered", "b", 1, true)
			confirm(t, s, "remembered", "a", 1, coord.ConfirmStale)
			e.clock.set(start.Add(time.Minute + time.Hour - time.Microsecond))
			purge(time.Hour, 1)
			release(t, s, "forgotten", "b", 1, true)
			confirm(t, s, "forgotten", "a", 1, coord.ConfirmedNow)
			e.clock.set(start.Add(time.Minute + time.Hour))
			purge(time.Hour, 2)
			purge(time.Hour, 0)
			confirm(t, s, "freed", "a", 1, coord.ConfirmedNow) // It is not remembered any more.
			if got := find(t, s, "expires later"); got != "" {
				t.Errorf("found %q, want it expired", got)
			}
			abandon(t, s, "expires later", "a", "h", true)
			if got := find(t, s, "confirmed"); got != "a@1" {
				t.Errorf("found %q, want a@1", got)
			}
		})
	}
}

// TestReservationTypes: each (context, aggregate) has its own table, made by many
// at once.
func TestReservationTypes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		var stores []*coord.ReservationStore
		for range 8 {
			db := e.open(t)
			db.SetMaxOpenConns(2)
			stores = append(stores, newCoord(t, db, e.dialect, e.config()).Reservations())
		}
		types := [][2]string{{"a", "b_c"}, {"a_b", "c"}, {"a", "b"}, {"b", "a"}, {"x1", "y2"}}
		for _, name := range types {
			scope := coord.ReservationScope{Context: name[0], Aggregate: name[1]}
			var wg sync.WaitGroup
			var won atomic.Int64
			for i, s := range stores {
				wg.Go(func() {
					switch _, err := s.Reserve(t.Context(), scope, "k", ref(fmt.Sprint(name, i)), "h", time.Hour); {
					case err == nil:
						won.Add(1)
					case !errors.Is(err, coord.ErrHeld):
						t.Errorf("%v: first use = %v", name, err)
					}
				})
			}
			wg.Wait()
			r, found, err := stores[0].Find(t.Context(), scope, "k")
			if won.Load() != 1 || !found || err != nil || !strings.HasPrefix(r.Owner.ID, fmt.Sprint(name)) {
				t.Errorf("%v: %d winners, Find = %+v, %v, %v, want one of this type", name, won.Load(), r, found, err)
			}
		}
		var tables int
		e.scan(t, "SELECT count(*) FROM coord_format WHERE table_name LIKE 'coord_reservation|_|_%' ESCAPE '|'", &tables)
		if tables != len(types) {
			t.Errorf("%d tables, want %d", tables, len(types))
		}
	})
}
