package integration

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/history"
)

// operation is a call of the linearizability tests. Every result has one text, and a
// model says which is right.
type operation struct {
	key, what, owner, hold string
	version                int64
}

// Each client has a Mutex of its own: callers of one Mutex are refused by each other
// too, when the lock itself may be free.
type lockState struct {
	holder string
	fence  int64
}

// lockModel is one name, at a TTL that does not end.
var lockModel = porcupine.Model{
	Partition: byKey,
	Init:      func() any { return lockState{} },
	Step: func(state, input, output any) (bool, any) {
		s, op, out := state.(lockState), input.(operation), output.(string)
		var fence int64
		switch {
		case op.what == "unlock":
			return out == "ok" && s.holder == op.owner, lockState{"", s.fence}
		case out == "held":
			return s.holder != "", s
		}
		_, err := fmt.Sscanf(out, "fence %d", &fence)
		return err == nil && s.holder == "" && fence > s.fence, lockState{op.owner, fence}
	},
}

// keyState is one key of reservations, at TTLs that do not end.
type keyState struct {
	owner     string // "" is free
	confirmed bool
	version   int64
	holds     string   // in order, with a comma after each
	released  [3]int64 // by owner: the version of its last release, plus one
}

var reservationsModel = porcupine.Model{
	Partition: byKey,
	Init:      func() any { return keyState{} },
	Step: func(state, input, output any) (bool, any) {
		s, op := state.(keyState), input.(operation)
		want := s.apply(op)
		if output.(string) == unknownHolder { // It was gone again when it was asked for.
			return strings.HasPrefix(want, unknownHolder), s
		}
		return want == output.(string), s
	},
}

const unknownHolder = "held by "

// apply is the state table of reservations: it changes s and says what the caller
// sees.
func (s *keyState) apply(op operation) string {
	mine, free := s.owner == op.owner, s.owner == ""
	released := &s.released[strings.Index("abc", op.owner)]
	switch op.what {
	case "find":
		return s.String()
	case "reserve":
		if !free && !mine {
			return unknownHolder + s.owner
		}
		s.owner = op.owner
		s.holds = without(s.holds, op.hold) + op.hold + ","
		s.holds = sortHolds(s.holds)
		return s.String()
	case "confirm":
		switch {
		case !free && !mine:
			return coord.ConfirmTaken.String()
		case s.confirmed && op.version <= s.version:
			return coord.ConfirmedBefore.String()
		case !s.confirmed && op.version < *released:
			return coord.ConfirmStale.String()
		}
		s.owner, s.confirmed, s.version, s.holds = op.owner, true, op.version, ""
		return coord.ConfirmedNow.String()
	case "release":
		if !mine || !s.confirmed || op.version < s.version {
			return "false"
		}
		s.confirmed, s.version, *released = false, 0, op.version+1
	case "abandon":
		if !mine || !strings.Contains(s.holds, op.hold+",") {
			return "false"
		}
		s.holds = without(s.holds, op.hold)
	}
	if s.holds == "" && !s.confirmed {
		s.owner = ""
	}
	return "true"
}

func (s *keyState) String() string {
	return fmt.Sprint(s.owner, " ", s.confirmed, " ", s.version, " ", s.holds)
}

func without(holds, hold string) string { return strings.ReplaceAll(holds, hold+",", "") }

func sortHolds(holds string) string {
	list := strings.Split(strings.TrimSuffix(holds, ","), ",")
	slices.Sort(list)
	return strings.Join(list, ",") + ","
}

func byKey(all []porcupine.Operation) [][]porcupine.Operation {
	parts := map[string][]porcupine.Operation{}
	for _, op := range all {
		key := op.Input.(operation).key
		parts[key] = append(parts[key], op)
	}
	var list [][]porcupine.Operation
	for _, part := range parts {
		list = append(list, part)
	}
	return list
}

// calls collects what clients have called.
type calls struct {
	mu  sync.Mutex
	all []porcupine.Operation
}

// call runs an operation of a client and notes it with its result.
func (c *calls) call(client int, op operation, do func() string) string {
	begin := history.Now()
	out := do()
	end := history.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, porcupine.Operation{ClientId: client, Input: op, Call: int64(begin), Output: out, Return: int64(end)})
	return out
}

const (
	linearClients = 6 // on two pools
	linearCalls   = 60
)

// clients lets some act at the same time, on two pools, and returns what they did.
func clients(t *testing.T, e *env, act func(calls *calls, client int, c *coord.Coord)) []porcupine.Operation {
	var all calls
	var wg sync.WaitGroup
	for pool := range 2 {
		db := e.open(t)
		db.SetMaxIdleConns(linearClients)
		c := newCoord(t, db, e.dialect, e.config())
		for i := range linearClients / 2 {
			wg.Go(func() { act(&all, 2*i+pool, c) })
		}
	}
	wg.Wait()
	return all.all
}

func locks(t *testing.T) func(*calls, int, *coord.Coord) {
	return func(calls *calls, client int, c *coord.Coord) {
		d, err := c.TableDriver(coord.DriverConfig{})
		if err != nil {
			t.Error(err)
			return
		}
		m, err := coord.NewMutex(d, coord.MutexConfig{TTL: time.Hour})
		if err != nil {
			t.Error(err)
			return
		}
		for range linearCalls {
			op := operation{key: fmt.Sprint("k", rand.IntN(2)), what: "lock", owner: fmt.Sprint(client)}
			var lock *coord.Lock
			out := calls.call(client, op, func() string {
				lock, err = m.TryLock(context.Background(), op.key)
				return outcome(err, func() string { return fmt.Sprint("fence ", lock.Fence()) })
			})
			if !strings.HasPrefix(out, "fence") {
				continue
			}
			time.Sleep(rand.N(2 * time.Millisecond))
			op.what = "unlock"
			calls.call(client, op, func() string { return outcome(lock.Unlock(context.Background()), func() string { return "ok" }) })
		}
	}
}

func reservationCalls(calls *calls, client int, c *coord.Coord) {
	for range linearCalls {
		op := operation{
			key:     fmt.Sprint("k", rand.IntN(3)),
			what:    []string{"reserve", "reserve", "confirm", "release", "abandon", "find"}[rand.IntN(6)],
			owner:   "abc"[rand.IntN(3):][:1],
			hold:    "xy"[rand.IntN(2):][:1],
			version: rand.Int64N(6),
		}
		calls.call(client, op, func() string { return op.send(c.Reservations()) })
	}
}

// send is the operation on the store, and its result as the model has it.
func (op operation) send(s *coord.ReservationStore) string {
	ctx, scope, owner := context.Background(), proofScope, coord.AggregateRef{ID: op.owner}
	switch op.what {
	case "reserve":
		r, err := s.Reserve(ctx, scope, op.key, owner, op.hold, time.Hour)
		return outcome(err, func() string { return shown(r) })
	case "confirm":
		got, err := s.Confirm(ctx, scope, op.key, owner, op.version)
		return outcome(err, got.String)
	case "release":
		was, err := s.Release(ctx, scope, op.key, owner, op.version)
		return outcome(err, func() string { return fmt.Sprint(was) })
	case "abandon":
		was, err := s.Abandon(ctx, scope, op.key, owner, op.hold)
		return outcome(err, func() string { return fmt.Sprint(was) })
	}
	r, _, err := s.Find(ctx, scope, op.key)
	return outcome(err, func() string { return shown(r) })
}

func shown(r coord.Reservation) string {
	s := keyState{owner: r.Owner.ID, confirmed: r.Confirmed, version: r.Version}
	for _, h := range r.Holds {
		s.holds += h + ","
	}
	return s.String()
}

// outcome is a call's result in words.
func outcome(err error, good func() string) string {
	var held *coord.HeldError
	switch {
	case err == nil:
		return good()
	case errors.As(err, &held) && strings.Contains(held.What, "reservation"):
		return unknownHolder + strings.TrimPrefix(held.Owner, "/")
	case errors.Is(err, coord.ErrHeld):
		return "held"
	}
	return err.Error()
}

// TestProofLinearizable: whatever many clients call at the same time, there is an
// order of the calls in which each result is right.
func TestProofLinearizable(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		if e.pooler {
			return
		}
		check(t, "mutex", lockModel, clients(t, e, locks(t)))
		check(t, "reservation", reservationsModel, clients(t, e, reservationCalls))
	})
}

func check(t *testing.T, name string, model porcupine.Model, all []porcupine.Operation) {
	t.Helper()
	if result := porcupine.CheckOperationsTimeout(model, all, time.Minute); result != porcupine.Ok {
		t.Errorf("%s: %d operations: %v, want %v", name, len(all), result, porcupine.Ok)
	}
}

// TestProofModels: they refuse what is wrong.
func TestProofModels(t *testing.T) {
	call := func(at int64, op operation, out string) porcupine.Operation {
		return porcupine.Operation{ClientId: int(at), Input: op, Call: at, Output: out, Return: at + 5}
	}
	lock := func(owner string) operation { return operation{key: "k", what: "lock", owner: owner} }
	unlock := func(owner string) operation { return operation{key: "k", what: "unlock", owner: owner} }
	key := func(what, owner string, version int64) operation {
		return operation{key: "k", what: what, owner: owner, hold: "x", version: version}
	}
	for _, test := range []struct {
		name  string
		model porcupine.Model
		calls []porcupine.Operation
		right bool
	}{
		{"locked in turn", lockModel, []porcupine.Operation{call(0, lock("a"), "fence 1"), call(10, lock("b"), "held"), call(20, unlock("a"), "ok"), call(23, lock("b"), "fence 2")}, true},
		{"locked by two", lockModel, []porcupine.Operation{call(0, lock("a"), "fence 1"), call(10, lock("b"), "fence 2"), call(20, unlock("a"), "ok")}, false},
		{"refused though free", lockModel, []porcupine.Operation{call(0, lock("a"), "fence 1"), call(10, unlock("a"), "ok"), call(20, lock("b"), "held")}, false},
		{"a token that went back", lockModel, []porcupine.Operation{call(0, lock("a"), "fence 2"), call(10, unlock("a"), "ok"), call(20, lock("b"), "fence 1")}, false},
		{"an error", lockModel, []porcupine.Operation{call(0, lock("a"), "connection reset")}, false},
		{"reserved and confirmed", reservationsModel, []porcupine.Operation{call(0, key("reserve", "a", 0), "a false 0 x,"), call(10, key("confirm", "a", 1), "confirmed now"), call(20, key("reserve", "b", 0), "held by a")}, true},
		{"refused by one who is gone", reservationsModel, []porcupine.Operation{call(0, key("confirm", "a", 1), "confirmed now"), call(10, key("reserve", "b", 0), "held by ")}, true},
		{"refused though free", reservationsModel, []porcupine.Operation{call(10, key("reserve", "b", 0), "held by ")}, false},
		{"of two", reservationsModel, []porcupine.Operation{call(0, key("confirm", "a", 1), "confirmed now"), call(10, key("confirm", "b", 1), "confirmed now")}, false},
		{"resurrected", reservationsModel, []porcupine.Operation{call(0, key("confirm", "a", 1), "confirmed now"), call(10, key("release", "a", 2), "true"), call(20, key("confirm", "a", 1), "confirmed now")}, false},
		{"not found", reservationsModel, []porcupine.Operation{call(0, key("confirm", "a", 1), "confirmed now"), call(10, key("find", "a", 0), " false 0 ")}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if right := porcupine.CheckOperations(test.model, test.calls); right != test.right {
				t.Errorf("right = %v, want %v", right, test.right)
			}
		})
	}
}
