package sim

import (
	"database/sql/driver"
	"fmt"
	"math/rand/v2"
	"time"
)

// kind is a kind of fault.
type kind int

const (
	slow      kind = iota // calls take longer
	failing               // calls fail with an error of the server
	badConn               // calls fail with driver.ErrBadConn, so that database/sql sends them again
	lost                  // the connection breaks under a call, before or after it was served
	hang                  // calls don't return for a while
	dialing               // dials hang or fail
	partition             // nothing gets through
	readOnly              // writes are refused
	full                  // the server takes no new connection
	diskFull              // writes fail
	restart               // all connections end, and new ones are refused
	cut                   // connections end without a word
	locked                // somebody's transaction holds up everything
	clock                 // a node's clock is off
	crash                 // a node sends nothing more; another process takes its place
	stop                  // a node stops in order, and starts again
	fading                // replies come later and later, then nothing gets through
	kinds
)

var kindNames = [kinds]string{"slow", "failing", "badConn", "lost", "hang", "dialing", "partition", "readOnly", "full", "diskFull", "restart",
	"cut", "locked", "clock", "crash", "stop", "fading"}

// fault is one fault of a plan.
type fault struct {
	kind   kind
	node   int // -1 is all
	from   time.Duration
	length time.Duration
	chance float64       // for each call
	delay  time.Duration // at most; of a hang exactly
	state  sqlError
	after  bool // once the call was served
	deaf   bool // in spite of contexts
	late   bool // a request whose caller has left is served all the same
	abrupt bool // a stop that does not wait for its users; a crash that leaves its connections open at the server
	out    bool // it is left out: its time passes without it
	rng    *rand.Rand
}

func (f fault) String() string {
	node := "all nodes"
	if f.node >= 0 {
		node = fmt.Sprint("node ", f.node)
	}
	text := fmt.Sprintf("%v to %v: %s, %s", f.from, f.from+f.length, kindNames[f.kind], node)
	if f.chance < 1 {
		text += fmt.Sprintf(", %g of the calls", f.chance)
	}
	if f.delay != 0 {
		text += fmt.Sprint(", ", f.delay)
	}
	if f.kind == failing {
		text += ", " + f.state.Error()
	}
	for _, flag := range []struct {
		set  bool
		name string
	}{{f.after, "after"}, {f.deaf, "deaf"}, {f.late, "late"}, {f.abrupt, "abrupt"}} {
		if flag.set {
			text += ", " + flag.name
		}
	}
	return text
}

// states are errors of a server that pass, by SQLSTATE.
var states = []sqlError{"40001", "40P01", "55P03", "57014", "53300", "25006", "0A000", "26000", "XX000", "57P01", "08006", "53100", "58030", "99999"}

// ends reports whether an error is the end of its connection. With any other, nothing was done.
func (e sqlError) ends() bool { return e == "57P01" || e == "08006" }

// outcome is what becomes of a call.
type outcome struct {
	before, after       time.Duration
	errBefore, errAfter error
	breaks, deaf, late  bool
	met                 bool // a fault
}

// outcome asks the faults of this moment.
func (p *process) outcome(op op) outcome {
	o := outcome{before: p.latency(), after: p.latency()}
	w := p.w
	if p.crashed {
		o.before, o.deaf = forever, true
		return o
	}
	for _, f := range w.active {
		if f.node >= 0 && f.node != p.node {
			continue
		}
		if f.chance < 1 && f.rng.Float64() >= f.chance {
			continue
		}
		if f.meet(p, op, &o) {
			o.met = true
			w.met(p, f, o)
			if o.errBefore != nil || o.errAfter != nil {
				break
			}
		}
	}
	return o
}

const forever = 1000 * time.Hour

// meet adds the fault to a call, and reports whether it concerns it.
func (f *fault) meet(p *process, op op, o *outcome) bool {
	delay := f.delay
	if p.pool > 0 { // A connection that is abandoned is one less.
		delay = min(delay, 30*time.Second)
	}
	switch f.kind {
	case slow:
		o.before += within(f.rng, f.delay*3/4, f.delay)
		o.after += within(f.rng, f.delay*3/4, f.delay)
	case failing:
		f.error(o, f.state, op == opDial || f.state.ends())
	case badConn:
		f.error(o, driver.ErrBadConn, true)
	case lost:
		f.error(o, errBroken, true)
	case hang:
		if f.after {
			o.after += delay
		} else {
			o.before += delay
		}
		o.errAfter, o.breaks = errBroken, true
	case dialing:
		if op != opDial {
			return false
		}
		o.before += delay
		o.errBefore = errBroken
	case partition:
		left := p.w.began.Add(f.from + f.length).Sub(p.w.now())
		o.before += left
		o.errBefore, o.breaks = errBroken, true
		if f.after { // What was sent arrives in the end.
			o.errBefore = nil
		}
	case fading:
		if left := p.w.began.Add(f.from + f.length).Sub(p.w.now()); left < f.length*2/3 {
			o.before, o.errBefore, o.breaks = o.before+left, errBroken, true
		} else {
			o.after += within(f.rng, f.delay/2, f.delay)
		}
	case readOnly:
		if op != opWrite && op != opCreate {
			return false
		}
		o.errBefore = sqlError("25006")
	case diskFull:
		if op != opWrite && op != opCreate && op != opCommit {
			return false
		}
		o.errBefore = sqlError("53100")
	case full:
		if op != opDial {
			return false
		}
		o.errBefore = sqlError("53300")
	case restart:
		if op != opDial {
			return false
		}
		o.errBefore = errBroken
	default:
		return false
	}
	o.deaf = o.deaf || f.deaf
	o.late = o.late || f.late
	return true
}

func (f *fault) error(o *outcome, err error, breaks bool) {
	o.breaks = breaks
	if f.after {
		o.errAfter = err
	} else {
		o.errBefore = err
	}
}

// newFaults draws the faults of a plan.
func newFaults(rng *rand.Rand, p *plan) (faults []*fault) {
	for range rng.IntN(16) {
		f := &fault{kind: kind(rng.IntN(int(kinds))), node: -1, chance: 1, rng: rand.New(rand.NewPCG(rng.Uint64(), 0))}
		f.from = within(rng, 0, p.length-p.quiet())
		f.length = within(rng, 100*time.Millisecond, []time.Duration{time.Second, 10 * time.Second, time.Minute}[rng.IntN(3)])
		f.length = min(f.length, p.length-p.quiet()-f.from)
		if rng.IntN(3) > 0 {
			f.node = rng.IntN(len(p.nodes))
		}
		f.after, f.deaf, f.late, f.abrupt = rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0
		switch f.kind {
		case slow:
			f.delay = within(rng, 10*time.Millisecond, p.timeout*3/10) // 60 % of the Timeout in all
			f.length = min(3*f.length, p.length-p.quiet()-f.from)
			f.deaf, f.late, f.after = false, false, false
		case fading:
			f.delay = p.timeout * 9 / 10
			f.length = min(max(f.length, 3*p.ttl), p.length-p.quiet()-f.from)
		case failing, badConn, lost:
			f.chance = []float64{1, 0.3, 0.05, 0.01}[rng.IntN(4)]
			f.state = states[rng.IntN(len(states))]
			f.after = f.after && (f.kind != failing || f.state.ends())
		case hang, dialing:
			f.chance = []float64{0.3, 0.05, 0.01}[rng.IntN(3)]
			f.delay = []time.Duration{p.timeout * 3 / 2, 3 * p.timeout, 30 * time.Second, 2 * time.Minute}[rng.IntN(4)]
		case clock:
			f.node = rng.IntN(len(p.nodes))
			f.delay = within(rng, -p.ttl/40, p.ttl/40)
			if p.skewed {
				f.delay = within(rng, -2*p.ttl, 2*p.ttl)
			}
		case crash, stop:
			f.node = rng.IntN(len(p.nodes))
			f.length = min(f.length, 20*time.Second)
		case locked:
			f.length = within(rng, 10*time.Millisecond, 2*p.timeout)
		}
		faults = append(faults, f)
	}
	if rng.IntN(4) == 0 { // A network that loses something now and then, all the time.
		faults = append(faults, &fault{kind: lost, node: -1, length: p.length - p.quiet(), chance: 0.01, after: rng.IntN(2) == 0, rng: rand.New(rand.NewPCG(rng.Uint64(), 0))})
	}
	return faults
}

// within draws a duration between two.
func within(rng *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(rng.Int64N(int64(most-least)+1))
}
