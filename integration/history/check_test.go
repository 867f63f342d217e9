package history

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// run is a right history of three owners: a holds and renews, is lost, b takes over
// and releases, c follows.
func run() []Event {
	return []Event{
		{Kind: Acquire, Primitive: "lease", Key: "k", Owner: "a", Token: 1, Sent: 1, At: 10, Until: 100},
		{Kind: Write, Primitive: "lease", Key: "k", Owner: "a", Token: 1, Sent: 20, At: 30},
		{Kind: Renew, Primitive: "lease", Key: "k", Owner: "a", Token: 1, At: 50, Until: 150},
		{Kind: Fault, Key: "stopped", Owner: "a", At: 60},
		{Kind: Acquire, Primitive: "lease", Key: "k", Owner: "b", Token: 2, Sent: 140, At: 160, Until: 260},
		{Kind: Lost, Primitive: "lease", Key: "k", Owner: "a", Token: 1, At: 200},
		{Kind: Refused, Primitive: "lease", Key: "k", Owner: "a", Token: 1, Sent: 201, At: 210},
		{Kind: Release, Primitive: "lease", Key: "k", Owner: "b", Token: 2, At: 220},
		{Kind: Acquire, Primitive: "lease", Key: "k", Owner: "c", Token: 3, Sent: 221, At: 230, Until: 330},
		{Kind: Acquire, Primitive: "lease", Key: "other", Owner: "a", Token: 1, Sent: 221, At: 230, Until: 330},
	}
}

func reservations() []Event {
	return []Event{
		{Kind: Acquire, Primitive: "reservation", Key: "k", Owner: "a", Sent: 1, At: 10, Until: 100},
		{Kind: Renew, Primitive: "reservation", Key: "k", Owner: "a", At: 50, Until: Forever},
		{Kind: Acquire, Primitive: "reservation", Key: "k", Owner: "a", Sent: 150, At: 160, Until: Forever}, // restarted
		{Kind: Release, Primitive: "reservation", Key: "k", Owner: "a", At: 200},
		{Kind: Acquire, Primitive: "reservation", Key: "k", Owner: "b", Sent: 190, At: 210, Until: 300},
	}
}

// TestCheck: what is wrong is found, and nothing else.
func TestCheck(t *testing.T) {
	for _, test := range []struct {
		name   string
		events []Event
		change func([]Event)
		want   []Wrong
	}{
		{"right", run(), func([]Event) {}, nil},
		{"right, reservations", reservations(), func([]Event) {}, nil},
		{"granted before the end", run(), func(e []Event) { e[4].At = 149 }, []Wrong{Overlap}},
		{"granted at the end", run(), func(e []Event) { e[4].At = 150 }, nil},
		{"granted before the release", run(), func(e []Event) { e[7].At = 240 }, []Wrong{Overlap}},
		{"a renewal that came late", run(), func(e []Event) { e[2].At = 110 }, nil},
		{"a renewal that came after the takeover", run(), func(e []Event) { e[2].At, e[4].Sent, e[4].At = 110, 103, 105 }, []Wrong{Overlap}},
		{"one that was killed holds to its end", run(), func(e []Event) { e[5].Kind = Fault; e[4].At = 149 }, []Wrong{Overlap}},
		{"lost before its end", run(), func(e []Event) { e[4].At, e[5].At = 149, 140 }, nil},
		{"one over several", run(), func(e []Event) { e[2].Until, e[5].At = 400, 300 }, []Wrong{Overlap, Overlap}},
		{"the same token", run(), func(e []Event) { e[8].Token = 2 }, []Wrong{TokenOrder}},
		{"a smaller token", run(), func(e []Event) { e[4].Token, e[7].Token, e[8].Token = 5, 5, 4 }, []Wrong{TokenOrder}},
		{"a smaller token of one that was asked for before", run(), func(e []Event) { e[4].Token, e[7].Token, e[8].Token, e[8].Sent = 5, 5, 4, 159 }, []Wrong{TokenOrder}},
		{"a smaller token whose answer was late", run(), func(e []Event) { e[4].Token, e[7].Token, e[8].Token, e[8].Sent, e[8].Until = 5, 5, 4, 159, 229 }, nil},
		{"a write after the takeover", run(), func(e []Event) { e[6].Kind = Write }, []Wrong{StaleWrite}},
		{"a write that was guarded before", run(), func(e []Event) { e[6].Kind, e[6].Sent = Write, 159 }, nil},
		{"taken though confirmed", reservations(), func(e []Event) { e[4].At = 199 }, []Wrong{LostReservation}},
		{"confirmed of two", reservations(), func(e []Event) { e[3].Kind = Fault }, []Wrong{LostReservation}},
		{"confirmed late", reservations(), func(e []Event) { e[1].At, e[2].Kind, e[4].At = 120, Fault, 150 }, []Wrong{LostReservation}},
		{"taken while pending", reservations(), func(e []Event) { e[4].At = 45; e[1].At = 60 }, []Wrong{Overlap, Overlap}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.change(test.events)
			var got []Wrong
			found := Check(test.events)
			for _, v := range found {
				got = append(got, v.Wrong)
			}
			if slices.Sort(got); !slices.Equal(got, test.want) {
				t.Errorf("Check = %q, want %q", found, test.want)
			}
		})
	}
}

func TestCheckWritten(t *testing.T) {
	write := func(owner string, token int64) Written { return Written{"lease", "k", owner, token, "write"} }
	key := func(owner, what string) Written { return Written{"reservation", "k", owner, 0, what} }
	for _, test := range []struct {
		name string
		log  []Written
		want []Wrong
	}{
		{"right", []Written{write("a", 1), write("a", 1), write("b", 2), {"lease", "other", "a", 1, "write"}}, nil},
		{"stale", []Written{write("a", 1), write("b", 2), write("a", 1), write("b", 2)}, []Wrong{StaleWrite}},
		{"stale for long", []Written{write("a", 1), write("c", 3), write("a", 1), write("b", 2)}, []Wrong{StaleWrite, StaleWrite}},
		{"right, reservations", []Written{key("a", "confirm"), key("a", "confirm"), key("a", "release"), key("b", "confirm")}, nil},
		{"another's", []Written{key("a", "confirm"), key("b", "confirm")}, []Wrong{LostReservation}},
		{"released by another", []Written{key("a", "confirm"), key("b", "release")}, []Wrong{LostReservation}},
		{"released twice", []Written{key("a", "confirm"), key("a", "release"), key("a", "release")}, []Wrong{LostReservation}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []Wrong
			for _, v := range CheckWritten(test.log) {
				got = append(got, v.Wrong)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("CheckWritten = %q, want %q", got, test.want)
			}
		})
	}
}

func TestRecorder(t *testing.T) {
	var file bytes.Buffer
	r := NewRecorder(&file)
	begin := Now()
	for _, e := range run() {
		if err := r.Record(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Record(Event{Kind: Lost, Key: "k"}); err != nil {
		t.Fatal(err)
	}
	file.WriteString(`{"Kind":"acquire","Key":"k`) // Killed.
	events, err := Read(&file)
	if err != nil || len(events) != len(run())+1 || !slices.Equal(events[:len(run())], run()) {
		t.Fatalf("Read = %v, %v", events, err)
	}
	if at := events[len(run())].At; at < begin || at > Now() {
		t.Errorf("an event without a time is at %v, want now, %v", at, begin)
	}
	if _, err := Read(strings.NewReader("{}\nno event\n")); err == nil {
		t.Error("Read of what is no history = nil")
	}
}

func TestShared(t *testing.T) {
	got := Shared(time.Now().Add(time.Hour)) - Now()
	if got > time.Hour || got < time.Hour-time.Minute {
		t.Errorf("an hour from now is in %v", got)
	}
}
