// Package history keeps what the workers of a run did, and checks it: that no two
// held the same thing at once, that tokens grew, that nobody wrote under a hold that
// another had taken over, and that what was confirmed stayed its owner's.
//
// The times are those of a clock that the processes of a machine share, see [Now].
// A history claims no more than its workers could believe: what [Check] reports has
// happened.
package history

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// Kind is what an event tells.
type Kind string

const (
	Acquire Kind = "acquire" // granted. Sent is when it was asked for, At when the answer was there
	Renew   Kind = "renew"   // still held, now until Until
	Lost    Kind = "lost"    // the holder has noticed that it holds it no more
	Release Kind = "release" // about to be given up: written before anything is sent
	Write   Kind = "write"   // committed under a guard, which was sent at Sent or later
	Refused Kind = "refused" // a guard said no
	Fault   Kind = "fault"   // not of a worker: Owner is whom it befell, Key what it was
)

// Forever is the Until of what has no TTL.
const Forever = time.Duration(1<<63 - 1)

// Event is a line of a history.
type Event struct {
	Kind      Kind
	Primitive string `json:",omitempty"`
	Key       string
	Owner     string        `json:",omitempty"` // who holds: one owner's claims don't exclude each other
	Token     int64         `json:",omitempty"` // 0: the primitive has none
	Sent      time.Duration `json:",omitempty"`
	At        time.Duration
	Until     time.Duration `json:",omitempty"` // the holder trusts it until then, if it hears nothing more
}

// Recorder appends events to a writer, one line and one write each. What a file has
// been handed outlives the process that is killed.
type Recorder struct {
	mu  sync.Mutex
	out io.Writer
}

// NewRecorder returns a Recorder on out.
func NewRecorder(out io.Writer) *Recorder { return &Recorder{out: out} }

// Record writes an event, at the present time if it has none.
func (r *Recorder) Record(e Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.At == 0 {
		e.At = Now()
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = r.out.Write(append(line, '\n'))
	}
	if err != nil {
		return fmt.Errorf("record %s of %s: %w", e.Kind, e.Key, err)
	}
	return nil
}

// Read returns the events of one recorder. A last line without its end is passed
// over: its writer was killed as it wrote it, before it went on.
func Read(in io.Reader) ([]Event, error) {
	text, err := io.ReadAll(in)
	if err != nil {
		return nil, fmt.Errorf("read a history: %w", err)
	}
	var events []Event
	for line := range bytes.Lines(text) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break
		}
		var e Event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("read a history: line %q: %w", line, err)
		}
		events = append(events, e)
	}
	return events, nil
}

// Shared is t, which has a monotonic reading, on the clock of [Now]. A delay between
// the two readings makes it early, never late: a history must not claim more than its
// workers could believe.
func Shared(t time.Time) time.Duration {
	now := Now()
	return now + time.Until(t)
}
