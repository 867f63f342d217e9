// Package sim runs whole clusters of coord in a test: nodes with their pools and users, on SQLite in memory, in fake
// time, with faults, all from a seed. See docs/simulation.md.
//
// One goroutine of a world runs at a time, and none is preempted, so nothing here needs a mutex.
package sim

import (
	"context"
	"database/sql/driver"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// plan is what follows from a seed before anything has run.
type plan struct {
	seed    uint64
	length  time.Duration
	timeout time.Duration // Config.Timeout
	ttl     time.Duration
	skewed  bool          // clocks may be off by more than the contract allows
	hasty   bool          // no caller waits for longer than 0.1 s, and tables take 0.2 s to make
	alike   bool          // all processes have the same Config.Owner
	names   int           // how many mutexes, ids, keys there are
	purge   time.Duration // the least age that Purge is called with
	groups  []group
	nodes   []nodePlan
	faults  []*fault
}

// group is a group of partitions that nodes run.
type group struct {
	name       string
	partitions int
}

// nodePlan is a node: a place where one process runs after another.
type nodePlan struct {
	pool      int // 0 is no limit
	noPrepare bool
	migrate   bool // before anything else
	users     []userPlan
}

type userPlan struct {
	kind int // an index of userKinds
	seed uint64
}

// quiet is the time without faults at the end: long enough for what a fault leaves behind to expire.
func (p *plan) quiet() time.Duration { return 2*p.ttl + 4*p.timeout + 20*time.Second }

func newPlan(seed uint64) *plan {
	rng := rand.New(rand.NewPCG(seed, 1))
	p := &plan{seed: seed, length: 10 * time.Minute}
	p.timeout = []time.Duration{time.Second, 2 * time.Second, 5 * time.Second}[rng.IntN(3)]
	p.ttl = p.timeout * time.Duration(3+rng.IntN(4))
	p.skewed = rng.IntN(10) == 0
	p.hasty = rng.IntN(10) == 0
	p.alike = rng.IntN(5) == 0
	p.names = 1 + rng.IntN(4)
	for i := range max(0, rng.IntN(4)-1) {
		p.groups = append(p.groups, group{fmt.Sprint("g", i), []int{1, 3, 8, 20}[rng.IntN(4)]})
	}
	for range 2 + rng.IntN(1+rng.IntN(1+rng.IntN(11))) { // Small worlds are as good, and more often drawn.
		n := nodePlan{pool: []int{0, 10, 2, 1}[rng.IntN(4)], noPrepare: rng.IntN(2) == 0, migrate: rng.IntN(2) == 0}
		for range 1 + rng.IntN(3) {
			n.users = append(n.users, userPlan{rng.IntN(len(userKinds)), rng.Uint64()})
		}
		p.nodes = append(p.nodes, n)
	}
	if seed == 0 { // A short one, with users of all kinds.
		p.length = p.quiet() + 10*time.Second
		p.nodes = []nodePlan{{users: nil}}
		for kind := range userKinds {
			p.nodes[0].users = append(p.nodes[0].users, userPlan{kind, uint64(kind)})
		}
	}
	if p.has("reservation") { // A Purge forgets releases, and old events are handled again here.
		p.purge = time.Hour
	}
	p.faults = newFaults(rng, p)
	return p
}

// has reports whether a node has users of a kind.
func (p *plan) has(kind string) bool {
	return slices.ContainsFunc(p.nodes, func(n nodePlan) bool {
		return slices.ContainsFunc(n.users, func(u userPlan) bool { return userKinds[u.kind].name == kind })
	})
}

// world is a run of a plan.
type world struct {
	*plan
	srv     *server
	began   time.Time
	over    chan struct{} // closed at the very end: what hangs returns
	active  []*fault
	nodes   []*node
	done    sync.WaitGroup // of the nodes
	closing sync.WaitGroup // of the pools

	weight      [3]int       // how many faults are active, by weight
	disturbed   [3]time.Time // until when something was not well, by the weight of the fault
	holds       map[string]*hold
	tokens      map[string]int64     // the largest by name
	freed       map[string]time.Time // when it was held last
	waiting     []*wait
	keys        map[string]*key
	asked       map[string][]time.Time // when acquisitions in flight were sent, by process and name
	unheld      map[string]time.Time   // since when a live row has been nobody's
	working     map[string]int         // calls of an fn, by partition: one that is stuck holds its partition up
	procs       []*process
	connections int
	statements  int
	meetings    int // calls that met a fault
	late        int

	hash    uint64
	verbose bool
	lines   []string
	wrong   []string
}

func newWorld(p *plan, verbose bool) (*world, error) {
	srv, err := newServer()
	if err != nil {
		return nil, err
	}
	return &world{plan: p, srv: srv, began: time.Now(), over: make(chan struct{}), holds: map[string]*hold{}, tokens: map[string]int64{},
		freed: map[string]time.Time{}, keys: map[string]*key{}, asked: map[string][]time.Time{}, unheld: map[string]time.Time{}, working: map[string]int{}, hash: 14695981039346656037, verbose: verbose}, nil
}

func (w *world) now() time.Time { return time.Now() }

func (w *world) must(_ *rows, err error) {
	if err != nil {
		panic(err)
	}
}

// run runs the plan to its end.
func (w *world) run() {
	for i := range w.plan.nodes {
		w.nodes = append(w.nodes, newNode(w, i))
	}
	var faults sync.WaitGroup
	for _, f := range w.faults {
		faults.Go(func() { w.inject(f) })
	}
	stop := make(chan struct{})
	var monitor sync.WaitGroup
	monitor.Go(func() { w.monitor(stop) })
	time.Sleep(w.length)
	faults.Wait()
	w.note("the end begins")
	close(stop)
	monitor.Wait()
	for _, n := range w.nodes {
		w.done.Go(n.leave)
	}
	w.done.Wait()
	time.Sleep(2*w.timeout + time.Second) // What is taken back in the background.
	w.checkOrphans()
	close(w.over)
	for _, p := range w.procs {
		p.bury()
	}
	w.closing.Wait()
	w.checkKeys()
	w.checkQuiet()
	if err := w.srv.close(); err != nil {
		w.fail("the server does not close: %v", err)
	}
}

// inject lets a fault begin and end.
func (w *world) inject(f *fault) {
	time.Sleep(f.from)
	if f.out {
		return
	}
	w.note("begins: %v", f)
	w.weight[f.weight()]++
	w.disturb(f, w.now())
	w.active = append(w.active, f)
	end := f.begin(w)
	time.Sleep(f.length)
	w.active = slices.DeleteFunc(slices.Clone(w.active), func(g *fault) bool { return g == f })
	end()
	w.weight[f.weight()]--
	w.disturb(f, w.now())
	w.note("ends: %v", f)
}

// begin does what a fault does by itself, beside what it does to calls, and returns how to end that.
func (f *fault) begin(w *world) (end func()) {
	switch f.kind {
	case restart, cut:
		for _, p := range w.procs {
			if f.node < 0 || f.node == p.node {
				p.killConnections(f)
			}
		}
	case locked:
		return w.lock()
	case clock:
		n := w.nodes[f.node]
		n.offset += f.delay
		return func() { n.offset -= f.delay }
	case crash:
		n := w.nodes[f.node]
		n.crash(f.abrupt)
		return func() { n.start() }
	case stop:
		n := w.nodes[f.node]
		if f.abrupt {
			n.p.close()
		}
		n.leave()
		return func() { n.start() }
	}
	return func() {}
}

// lock is somebody's transaction, which holds up everything.
func (w *world) lock() (end func()) {
	p := &process{w: w, node: -1, name: "somebody"}
	c := &conn{p: p, killed: make(chan struct{})}
	if err := c.exclude(context.Background(), opBegin); err != nil {
		return func() {}
	}
	w.possible(w.srv.take(c))
	return func() {
		if w.srv.owner == c {
			c.end()
		}
	}
}

func (w *world) restartError() error { return sqlError("57P01") }

// The weights of faults.
const (
	lightly = iota // a call in a hundred fails: one more try is enough
	slowly         // the database takes up to 60 % of the Timeout
	heavily
)

func (f *fault) weight() int {
	switch {
	case f.kind == slow:
		return slowly
	case (f.kind == failing || f.kind == badConn || f.kind == lost) && f.chance <= 0.01:
		return lightly
	}
	return heavily
}

// met notes that a call met a fault. All may take a Timeout to be well again, or until the call returns if there may
// be no other connection.
func (w *world) met(p *process, f *fault, o outcome) {
	w.meetings++
	most := w.timeout
	if p.pool > 0 {
		most = w.length
	}
	w.disturb(f, w.now().Add(min(o.before+o.after, most)))
}

// disturb notes that something is not well until a time.
func (w *world) disturb(f *fault, until time.Time) {
	if i := f.weight(); until.After(w.disturbed[i]) {
		w.disturbed[i] = until
	}
}

// since returns when all was well again, but for faults of less weight; now, if it is not yet.
func (w *world) since(weight int) time.Time {
	at := w.srv.stalled()
	for i := weight; i <= heavily; i++ {
		if w.weight[i] > 0 {
			return w.now()
		}
		if w.disturbed[i].After(at) {
			at = w.disturbed[i]
		}
	}
	return at
}

// calm reports whether nothing has been disturbed for so long, but for faults of less weight.
func (w *world) calm(weight int, d time.Duration) bool { return w.now().Sub(w.since(weight)) > d }

// event is part of the history, whose hash tells one run from another.
func (w *world) event(c *conn, what, name string, args []driver.NamedValue, got *rows, err error) {
	w.mix(uint64(w.now().Sub(w.began)))
	w.mix(uint64(c.id))
	w.mixText(what)
	w.mixText(name)
	for _, a := range args {
		switch v := a.Value.(type) {
		case int64:
			w.mix(uint64(v))
		case string:
			w.mixText(v)
		}
	}
	if got != nil {
		w.mix(uint64(len(got.rows)))
	}
	if !w.verbose {
		return
	}
	text := fmt.Sprintf("%s/%d %s %s", c.p.name, c.id, what, name)
	if len(args) > 0 {
		values := make([]string, len(args))
		for i, a := range args {
			values[i] = fmt.Sprint(a.Value)
		}
		text += " (" + strings.Join(values, ", ") + ")"
	}
	if got != nil {
		text += ": " + got.String()
	}
	if err != nil {
		text += ": " + err.Error()
	}
	w.note("%s", text)
}

// mix is FNV-1a, by words.
func (w *world) mix(v uint64) { w.hash = (w.hash ^ v) * 1099511628211 }

func (w *world) mixText(s string) {
	for i := range len(s) {
		w.mix(uint64(s[i]))
	}
}

// note adds a line to the timeline.
func (w *world) note(format string, args ...any) {
	if w.verbose {
		w.lines = append(w.lines, fmt.Sprintf("%13s  %s", w.now().Sub(w.began).Round(time.Microsecond), fmt.Sprintf(format, args...)))
	}
}

// fail notes that something is wrong.
func (w *world) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	w.mixText(text)
	w.note("WRONG: %s", text)
	w.wrong = append(w.wrong, fmt.Sprintf("%v: %s", w.now().Sub(w.began).Round(time.Microsecond), text))
}

// logger puts what a process logs into the timeline.
type logger struct {
	slog.Handler
	p *process
}

func (l logger) Enabled(context.Context, slog.Level) bool { return true }
func (l logger) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l logger) Handle(_ context.Context, r slog.Record) error {
	l.p.w.mixText(r.Message)
	if l.p.w.verbose {
		text := r.Message
		r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
		l.p.w.note("%s logs: %s", l.p.name, text)
	}
	return nil
}
