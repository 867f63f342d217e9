package sim

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/seed-4c80c132/coord"
)

var scope = coord.ReservationScope{Context: "sim", Aggregate: "thing"}

// key is what is known of a reserved key.
type key struct {
	owner    string // who has confirmed it, "" if nobody
	version  int64  // at which
	hold     *hold
	busy     bool // somebody releases it
	asking   int  // who reserves it
	unsure   bool // a reply was lost for good
	released map[string]int64
	events   []keyEvent // that were acknowledged
}

type keyEvent struct {
	owner   string
	release bool
	version int64
}

// reserve reserves a key, and confirms or abandons it; or releases one that is confirmed; or handles an event again.
func (u *user) reserve() {
	name := fmt.Sprint("k", u.rng.IntN(u.w.names))
	k := u.w.keys[name]
	if k == nil {
		k = &key{released: map[string]int64{}}
		u.w.keys[name] = k
	}
	switch {
	case len(k.events) > 0 && u.chance(4):
		u.replay(name, k, k.events[u.rng.IntN(len(k.events))])
	case k.owner != "" && !k.busy && u.chance(2):
		k.busy = true
		u.releaseKey(name, k)
		k.busy = false
	default:
		u.reserveKey(name, k)
	}
}

func ref(owner string) coord.AggregateRef { return coord.AggregateRef{Tenant: "t", ID: owner} }

// replay handles an event again: whatever has come after it stands.
func (u *user) replay(name string, k *key, e keyEvent) {
	ctx, cancel := u.context()
	defer cancel()
	before := k.released[e.owner]
	done := u.expectAfter(ctx, "a replay", u.w.timeout)
	defer done()
	if e.release {
		freed, err := u.c.Reservations().Release(ctx, scope, name, ref(e.owner), e.version)
		if err == nil && freed && e.version <= before {
			u.w.fail("%s: an old Release of %s at %d by %s, after one at %d, answers true", u.id, name, e.version, e.owner, before)
		}
		return
	}
	got, err := u.c.Reservations().Confirm(ctx, scope, name, ref(e.owner), e.version)
	if err == nil && got == coord.ConfirmedNow {
		u.w.fail("%s: a Confirm of %s at %d by %s, which had been acknowledged, is %v", u.id, name, e.version, e.owner, got)
	}
}

// reserveKey reserves a key as a command does, and confirms it or gives it up.
func (u *user) reserveKey(name string, k *key) {
	ctx, cancel := u.context()
	defer cancel()
	hold := fmt.Sprint("h", u.n)
	full := "key/" + name
	free := k.owner == "" && !k.unsure && k.asking == 0 && u.w.holds[full] == nil && time.Since(u.w.freed[full]) > u.w.ttl+u.w.timeout
	sent := u.w.now()
	k.asking++
	done := u.expectAfter(ctx, "Reserve", 0)
	_, err := u.c.Reservations().Reserve(ctx, scope, name, ref(u.id), hold, u.w.ttl)
	done()
	k.asking--
	u.check("reserve", err)
	u.answered(err)
	if free && errors.Is(err, coord.ErrHeld) && k.asking == 0 && u.w.freed[full].Before(sent) && u.w.calm(lightly, u.w.ttl+u.w.timeout) && !u.w.skewed {
		u.w.fail("%s: Reserve of %s, which has been free since %v: %v", u.id, name, u.w.freed[full].Sub(u.w.began), err)
	}
	if err != nil || k.owner == u.id {
		return
	}
	left := u.w.ttl - u.w.ttl/10 - u.w.now().Sub(sent)
	if left <= 0 {
		return
	}
	h := u.w.grant("key/"+name, u, u.w.tokens["key/"+name]+1, 0)
	expiry := time.AfterFunc(left, h.end)
	u.work(u.life, 2*time.Second)
	if u.crashed {
		return
	}
	if u.chance(4) { // A second hold outlives the first.
		sent := u.w.now()
		if _, err := u.c.Reservations().Reserve(u.life, scope, name, ref(u.id), hold+"b", u.w.ttl); err == nil && !h.over {
			expiry.Reset(max(u.w.ttl-u.w.ttl/10-u.w.now().Sub(sent), 0))
			_, _ = u.c.Reservations().Abandon(u.life, scope, name, ref(u.id), hold)
			hold += "b"
			u.work(u.life, 2*time.Second)
		}
		if u.crashed {
			return
		}
	}
	if u.chance(3) {
		h.end()
		expiry.Stop()
		done := u.expect("Abandon", u.w.timeout)
		_, err := u.c.Reservations().Abandon(u.releasing(), scope, name, ref(u.id), hold)
		done()
		u.check("abandon", err)
		return
	}
	u.confirmKey(name, k, h, expiry)
}

// confirmKey confirms a key, again and again until it knows what has become of it.
func (u *user) confirmKey(name string, k *key, h *hold, expiry *time.Timer) {
	version := int64(u.w.now().Sub(u.w.began))
	for {
		got, err := u.c.Reservations().Confirm(context.Background(), scope, name, ref(u.id), version)
		switch {
		case u.crashed:
			k.unsure = true
			return
		case err != nil:
			u.check("confirm", err)
			if errors.Is(err, coord.ErrClosed) || u.life.Err() != nil {
				k.unsure = true
				h.end()
				return
			}
			time.Sleep(100 * time.Millisecond)
			continue
		}
		expiry.Stop()
		switch got {
		case coord.ConfirmedNow, coord.ConfirmedBefore:
			if h.over { // Its hold had expired, and the key was free.
				h = u.w.grant("key/"+name, u, u.w.tokens["key/"+name]+1, 0)
			}
			k.owner, k.version, k.hold = u.id, version, h
			k.events = append(k.events, keyEvent{u.id, false, version})
		case coord.ConfirmTaken:
			if !h.over && !u.w.skewed {
				u.w.fail("%s: Confirm of %s is %v though its hold has not expired", u.id, name, got)
			}
			h.end()
		default:
			u.w.fail("%s: Confirm of %s at %d is %v after a Release at %d", u.id, name, version, got, k.released[u.id])
			h.end()
		}
		return
	}
}

// releaseKey releases a confirmed key for its owner.
func (u *user) releaseKey(name string, k *key) {
	owner, version := k.owner, k.version+1
	k.hold.end()
	for tries := 1; ; tries++ {
		done := u.expect("Release", u.w.timeout)
		freed, err := u.c.Reservations().Release(u.releasing(), scope, name, ref(owner), version)
		done()
		switch {
		case u.crashed, errors.Is(err, coord.ErrClosed), err != nil && u.life.Err() != nil:
			k.unsure = true
			if k.version < version {
				k.owner = ""
			}
			return
		case err != nil:
			u.check("release key", err)
			time.Sleep(100 * time.Millisecond)
			continue
		case !freed && u.w.calm(lightly, u.w.timeout):
			u.w.fail("%s: Release of %s at %d by %s, which had confirmed it at %d, answers false", u.id, name, version, owner, k.version)
		}
		if k.owner == owner && k.version < version { // Else it was confirmed again meanwhile.
			k.owner = ""
		}
		k.released[owner] = version
		k.events = append(k.events, keyEvent{owner, true, version})
		return
	}
}

// checkKeys: at the end, each key is whose it is known to be.
func (w *world) checkKeys() {
	for name, k := range w.keys {
		if k.unsure || !w.srv.has("coord_reservation__sim__thing") {
			continue
		}
		got, err := w.srv.exec("SELECT owner_id FROM coord_reservation__sim__thing WHERE key = ?1 AND confirmed", []driver.NamedValue{{Value: name}})
		w.must(got, err)
		if len(got.rows) == 0 && k.owner != "" || len(got.rows) == 1 && got.rows[0][0] != k.owner {
			w.fail("key %s is confirmed by %q, and the table says %v", name, k.owner, got.rows)
		}
	}
}
