package history

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Wrong is what kind of promise was broken.
type Wrong string

const (
	Overlap         Wrong = "two holders at once"
	TokenOrder      Wrong = "token out of order"
	StaleWrite      Wrong = "guarded write after takeover"
	LostReservation Wrong = "lost reservation"
)

// Violation is one broken promise.
type Violation struct {
	Wrong     Wrong
	Primitive string
	Key       string
	Text      string
}

func (v Violation) String() string {
	return fmt.Sprintf("%s: %s %s: %s", v.Wrong, v.Primitive, v.Key, v.Text)
}

// Claim is one stretch of time in which an owner could believe that it held
// something.
type Claim struct {
	Primitive, Key, Owner string
	Token                 int64
	Sent, From            time.Duration // asked for, granted
	To                    time.Duration
	Ended                 bool          // on record: else it ran out, or its owner was killed
	resumed               bool          // by a renewal that came after its end: nobody had it in between
	inTime                bool          // the grant was known before it ran out
	confirmed             time.Duration // when it became Forever, 0 if it did not
}

func (c Claim) String() string {
	return fmt.Sprintf("%s at token %d from %.6f to %.6f s", c.Owner, c.Token, c.From.Seconds(), c.To.Seconds())
}

// thing is what one owner at a time can hold.
type thing struct{ primitive, key string }

// Sort puts the events of several recorders in the order of time.
func Sort(events []Event) {
	slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
}

// Claims returns the claims of a history, in the order in which they began.
func Claims(events []Event) []Claim {
	type holding struct {
		thing
		owner string
		token int64
	}
	events = slices.Clone(events)
	Sort(events)
	var claims []Claim
	open := map[holding]int{} // index of the claim
	for _, e := range events {
		h := holding{thing{e.Primitive, e.Key}, e.Owner, e.Token}
		i, held := open[h]
		switch {
		case e.Kind == Acquire:
			if held { // By a restarted process of that owner, or once more: the new claim goes on from here.
				claims[i].To = min(claims[i].To, e.At)
			}
			open[h] = len(claims)
			claims = append(claims, begin(e))
		case !held:
		case e.Kind == Renew && e.At > claims[i].To:
			resumed := begin(e)
			resumed.Sent, resumed.resumed = claims[i].Sent, true
			open[h] = len(claims)
			claims = append(claims, resumed)
		case e.Kind == Renew:
			claims[i].To = max(claims[i].To, e.Until)
			claims[i].confirm(e)
		case e.Kind == Lost || e.Kind == Release:
			claims[i].To, claims[i].Ended = min(claims[i].To, e.At), true
			delete(open, h)
		}
	}
	return claims
}

func begin(e Event) Claim {
	c := Claim{Primitive: e.Primitive, Key: e.Key, Owner: e.Owner, Token: e.Token, Sent: e.Sent, From: e.At, To: max(e.At, e.Until), inTime: e.At < e.Until}
	c.confirm(e)
	return c
}

func (c *Claim) confirm(e Event) {
	if e.Until == Forever && c.confirmed == 0 {
		c.confirmed = e.At
	}
}

// Check returns what is wrong with a history; nothing if every promise was kept.
func Check(events []Event) []Violation {
	var wrong []Violation
	byThing := map[thing][]Claim{}
	var things []thing
	for _, c := range Claims(events) {
		t := thing{c.Primitive, c.Key}
		if byThing[t] == nil {
			things = append(things, t)
		}
		byThing[t] = append(byThing[t], c)
	}
	for _, t := range things {
		wrong = slices.Concat(wrong, overlaps(byThing[t]), tokens(byThing[t]), staleWrites(events, t, byThing[t]))
	}
	return wrong
}

// overlaps finds a claim that began before another's was over: not only the one
// just before it, for a long one may reach over several.
func overlaps(claims []Claim) (wrong []Violation) {
	for i, c := range claims {
		for _, before := range claims[:i] {
			if c.From < before.To && c.From < c.To && c.Owner != before.Owner {
				kind := Overlap
				if before.confirmed != 0 && before.confirmed < c.From {
					kind = LostReservation
				}
				wrong = append(wrong, violation(kind, c, "%s, and %s", before, c))
			}
		}
	}
	return wrong
}

// tokens finds an acquisition that came after another and has no larger token.
func tokens(claims []Claim) (wrong []Violation) {
	for i, c := range claims {
		for _, before := range claims[:i] {
			switch {
			case c.Token == 0 || before.Token == 0 || c.resumed && c.Owner == before.Owner:
			case c.Token == before.Token:
				wrong = append(wrong, violation(TokenOrder, c, "the same twice: %s, and %s", before, c))
			case c.Token < before.Token && after(c, before):
				wrong = append(wrong, violation(TokenOrder, c, "%s, and then %s", before, c))
			}
		}
	}
	return wrong
}

// after tells whether c was granted after before, whose answer came first. That is
// sure if c was asked for only then. It is sure too if neither had run out when its
// answer came: granted the other way round, before would have been while c was live.
func after(c, before Claim) bool {
	return before.From < c.Sent || before.From < c.From && before.inTime && c.inTime && !c.resumed
}

// staleWrites finds a write whose guard was sent when a later claim had been
// granted already.
func staleWrites(events []Event, t thing, claims []Claim) (wrong []Violation) {
	for _, e := range events {
		if e.Kind != Write || e.Token == 0 || (thing{e.Primitive, e.Key}) != t {
			continue
		}
		for _, c := range claims {
			if c.Token > e.Token && c.From < e.Sent {
				wrong = append(wrong, violation(StaleWrite, c, "%s, and then a write of %s at token %d, guarded at %.6f s", c, e.Owner, e.Token, e.Sent.Seconds()))
				break
			}
		}
	}
	return wrong
}

func violation(kind Wrong, c Claim, format string, args ...any) Violation {
	return Violation{kind, c.Primitive, c.Key, fmt.Sprintf(format, args...)}
}

// Written is a row of the log that guarded transactions append to, in the order in
// which they were let into it: the guard that comes first in each keeps others out
// until it ends.
type Written struct {
	Primitive, Key, Owner string
	Token                 int64
	What                  string // "write"; of reservations "confirm" and "release"
}

// CheckWritten returns what is wrong with a log.
func CheckWritten(log []Written) (wrong []Violation) {
	last := map[thing]Written{}
	for _, w := range log {
		t := thing{w.Primitive, w.Key}
		before, any := last[t]
		last[t] = w
		switch {
		case !any:
		case w.What == "write" && w.Token < before.Token:
			wrong = append(wrong, Violation{StaleWrite, w.Primitive, w.Key, fmt.Sprintf("%s at token %d wrote after %s at token %d", w.Owner, w.Token, before.Owner, before.Token)})
			last[t] = before // It is still the largest.
		case w.What == "confirm" && before.What == "confirm" && w.Owner != before.Owner:
			wrong = append(wrong, Violation{LostReservation, w.Primitive, w.Key, fmt.Sprintf("confirmed for %s while it was %s's", w.Owner, before.Owner)})
		case w.What == "release" && (before.What != "confirm" || before.Owner != w.Owner):
			wrong = append(wrong, Violation{LostReservation, w.Primitive, w.Key, fmt.Sprintf("released by %s while it was not its own: before it %s by %s", w.Owner, before.What, before.Owner)})
		}
	}
	return wrong
}
