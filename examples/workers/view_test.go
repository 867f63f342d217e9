package main

import (
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/seed-4c80c132/coord"
)

// The table and the lines must fit a terminal of 80 columns: a line that wraps
// would break the drawing in place.
func TestViewFits(t *testing.T) {
	var leases []coord.Lease
	for p := range 14 {
		leases = append(leases, coord.Lease{Partition: p, Owner: "w1", Epoch: 9})
	}
	workers := []*process{{name: "w1"}, {name: "w2", killed: true}}
	for _, inPlace := range []bool{true, false} {
		var out strings.Builder
		v := &view{out: &out, begin: time.Now().Add(-999 * time.Second), inPlace: inPlace, holds: map[string]string{}}
		v.show(workers, 14, leases)
		for line := range strings.Lines(out.String()) {
			if n := utf8.RuneCountInString(line) - 1; n > 79 {
				t.Errorf("in place %v: %d columns, want at most 79: %q", inPlace, n, line)
			}
		}
	}
}

func TestViewDrawsInPlace(t *testing.T) {
	var out strings.Builder
	v := &view{out: &out, begin: time.Now(), inPlace: true}
	v.show([]*process{{name: "w1"}}, 2, nil)
	v.event("hello")
	_, after, _ := strings.Cut(out.String(), "\r\x1b[4A\x1b[J") // up over the four lines of the table
	if !strings.Contains(after, "hello\n\n") || !strings.HasSuffix(after, v.table) {
		t.Errorf("after an event the screen gets %q, want the event and then the table", after)
	}
	if strings.Contains(out.String(), "\x1b[3") {
		t.Errorf("%q has colours without color", out.String())
	}
}

func TestViewTellsChangesOnly(t *testing.T) {
	var out strings.Builder
	v := &view{out: &out, begin: time.Now(), holds: map[string]string{}}
	workers := []*process{{name: "w1"}, {name: "w2"}}
	held := []coord.Lease{{Partition: 3, Owner: "w2", Epoch: 7}}
	for _, leases := range [][]coord.Lease{nil, held, held, nil, nil} {
		v.show(workers, 4, leases)
	}
	if got, want := out.String(), "  0.0 s  w2 holds 3@7\n  0.0 s  w2 holds nothing\n"; got != want {
		t.Errorf("lines = %q, want %q", got, want)
	}
}

func TestParse(t *testing.T) {
	for _, args := range []string{
		"extra", "-workers=1", "-workers=10", "-partitions=0", "-partitions=15", "-for=1s", "-for=2h", "-db=file.db", "-no-such",
	} {
		if opts, err := parse([]string{args}, io.Discard); err == nil {
			t.Errorf("parse(%s) = %+v, want an error", args, opts)
		}
	}
	opts, err := parse([]string{"-db", "postgres://me:secret@host/db"}, io.Discard)
	if err != nil || strings.Contains(opts.database(), "secret") {
		t.Errorf("parse = %v, named %q, want no error and no password", err, opts.database())
	}
}
