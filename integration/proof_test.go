package integration

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/history"
)

// TestProof runs processes that contend for everything coord has, does them harm,
// and checks what they have written down. It is short unless COORD_PROOF is "full":
// make proof.
func TestProof(t *testing.T) {
	full := fullProof()
	var rows proofTable
	t.Run("faults", func(t *testing.T) {
		for i, f := range faults {
			for j, driver := range []string{"pq", "pgx"} {
				if !full && (!f.short || i%2 != j) {
					continue
				}
				t.Run(f.name+"/"+driver, func(t *testing.T) {
					if !full {
						t.Parallel() // They mostly wait.
					}
					rows.add(proveUnder(t, f, driver).rows)
				})
			}
		}
	})
	if full {
		fmt.Print(rows.String()) // Of what a test logs, go test shows nothing if it passes.
		return
	}
	t.Logf("\n%s", rows.String())
}

const (
	proofTTL     = time.Second
	proofMostTTL = 16 * proofTTL
	proofKeys    = 3 // of each primitive
	proofWorkers = 3
	proofEnough  = 2 * proofKeys // acquisitions of each primitive by the workers

	// proofPatience bounds what takes a moment on a machine that has nothing else to do.
	proofPatience = 2 * time.Minute
)

// fullProof tells whether all of it is asked for.
func fullProof() bool { return os.Getenv("COORD_PROOF") == "full" }

// proofLength is that of a run's first round. A round with a longer TTL is longer.
func proofLength() time.Duration {
	if fullProof() {
		return 10 * time.Second
	}
	return 5 * time.Second
}

// proof is one run.
type proof struct {
	*env
	t       *testing.T
	fault   fault
	dir     string
	rec     *history.Recorder // of the faults, and of what comes after the workers
	own     bytes.Buffer
	ttl     time.Duration // of what the workers hold
	workers []*worker
	cluster *clusters // of the run's own, if the fault needs that

	history []history.Event // once it is over
	rows    []proofRow
}

// worker is a process that proves, and those that were killed before it.
type worker struct {
	slot  string
	proxy *proxy
	*process
	started int
}

// proveUnder is one run under a fault.
func proveUnder(t *testing.T, f fault, driver string) *proof {
	p := &proof{t: t, fault: f, dir: t.TempDir()}
	p.rec = history.NewRecorder(&p.own)
	p.env = p.database(driver)
	p.exec(t, proofTables)
	c, err := coord.New(p.db, p.dialect, p.config())
	if err == nil {
		err = c.Migrate(t.Context(), proofScope)
	}
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	for i := range proofWorkers {
		p.workers = append(p.workers, &worker{slot: fmt.Sprint("w", i), proxy: proxyTo(t, p.host())})
	}
	// On a busy machine little can be acquired in time: then the workers go on with longer TTLs.
	for p.ttl = proofTTL; ; p.ttl *= 2 {
		p.round(p.ttl > proofTTL && f.once)
		if p.ttl >= proofMostTTL || p.enough() {
			break
		}
		t.Logf("TTL %v: too little was acquired", p.ttl)
	}
	p.judge()
	return p
}

// round lets the workers work for a while, under the fault unless calm.
func (p *proof) round(calm bool) {
	for _, w := range p.workers {
		p.launch(w)
	}
	ctx, cancel := context.WithTimeout(p.t.Context(), proofLength()*(p.ttl/proofTTL))
	defer cancel()
	pause(ctx, p.ttl/2)
	if !calm {
		p.fault.inject(ctx, p)
	}
	<-ctx.Done()
	for _, w := range p.workers {
		w.stdin.Close()
	}
	for _, w := range p.workers {
		late := time.AfterFunc(proofPatience, func() { _ = w.cmd.Process.Signal(syscall.SIGQUIT) }) // It tells where it hangs.
		w.wait(p.t, func(line string) { p.t.Errorf("%s says %q", w.slot, line) })
		late.Stop()
	}
}

// database makes the run's database, on a server of its own if it needs one.
func (p *proof) database(driver string) *env {
	e := engineNamed("postgres-" + driver)
	switch {
	case p.fault.pooler:
		e = engineNamed("pgbouncer-" + driver)
	case p.fault.cluster != nil:
		p.cluster = p.fault.cluster(p.t)
		e.dsn = func(testing.TB) string { return p.cluster.primary.URL() }
	}
	env := &env{engine: e, url: e.dsn(p.t)} // Without the search for goroutines: runs go in parallel.
	env.db = env.open(p.t)
	env.db.SetMaxIdleConns(0) // Sessions end under us too, and settings hold for new ones.
	if p.fault.prepare != nil {
		p.env = env
		p.fault.prepare(p)
	}
	return env
}

func (p *proof) host() string {
	u, err := url.Parse(p.url)
	if err != nil {
		p.t.Fatal(err)
	}
	return u.Host
}

// launch starts the worker's next process.
func (p *proof) launch(w *worker) {
	u, err := url.Parse(p.url)
	if err != nil {
		p.t.Fatal(err)
	}
	u.Host = w.proxy.addr()
	q := u.Query()
	q.Set("connect_timeout", "1") // lib/pq heeds no context while it connects.
	u.RawQuery = q.Encode()
	through := *p.env
	through.url = u.String()
	name := fmt.Sprint(w.slot, "-", w.started)
	w.started++
	w.process = through.start(p.t, "prover", orders{Prover: proverOrders{
		Name: name, Slot: w.slot, File: filepath.Join(p.dir, name), TTL: p.ttl, Keys: proofKeys, Pool: 12,
	}})
	if !w.lines.Scan() || w.lines.Text() != "ready" {
		w.process.cmd.Wait()
		p.t.Fatalf("%s is not ready: %q %s", name, w.lines.Text(), w.errors.Bytes())
	}
}

// enough reports whether the workers have acquired every primitive often enough.
func (p *proof) enough() bool {
	events, err := p.recorded()
	if err != nil {
		return true // It is reported when the run is judged.
	}
	by := map[string]int{}
	for _, e := range events {
		if e.Kind == history.Acquire {
			by[e.Primitive]++
		}
	}
	return !slices.ContainsFunc(primitives, func(prim primitive) bool { return by[prim.name] < proofEnough })
}

// mark records what befell whom.
func (p *proof) mark(whom, what string) {
	if err := p.rec.Record(history.Event{Kind: history.Fault, Owner: whom, Key: what}); err != nil {
		p.t.Error(err)
	}
}

func (p *proof) anyWorker() *worker { return p.workers[rand.IntN(len(p.workers))] }

// judge checks a run whose workers have ended.
func (p *proof) judge() {
	p.acquireAll()
	p.history = p.events()
	wrong := slices.Concat(history.Check(p.history), history.CheckWritten(p.written()), p.lostReservations())
	for _, prim := range primitives {
		row := proofRow{fault: p.fault.name, driver: p.name[strings.Index(p.name, "-")+1:], primitive: prim.name}
		row.count(p.history, wrong)
		if row.acquired < proofEnough {
			p.t.Errorf("%s was acquired %d times: that proves nothing", prim.name, row.acquired)
		}
		p.rows = append(p.rows, row)
	}
	p.verdict(wrong)
}

// verdict fails the test for what is wrong, or for what is not, if the fault is one
// that coord can't stand.
func (p *proof) verdict(wrong []history.Violation) {
	switch {
	case p.fault.violates && len(wrong) == 0:
		p.t.Error("nothing is wrong: this can't have been the fault it should be, or the checker sees nothing")
	case p.fault.violates:
		p.t.Logf("as it must be: %d violations, such as %v", len(wrong), wrong[0])
	default:
		for _, v := range wrong[:min(len(wrong), 20)] {
			p.t.Error(v)
		}
		if len(wrong) > 0 {
			p.keep()
		}
	}
}

// keep leaves the history of a run that went wrong to be looked at.
func (p *proof) keep() {
	file, err := os.CreateTemp("", "coord-proof-*.history")
	if err != nil {
		p.t.Error(err)
		return
	}
	defer file.Close()
	rec := history.NewRecorder(file)
	for _, e := range p.history {
		if err := rec.Record(e); err != nil {
			p.t.Error(err)
		}
	}
	p.t.Logf("the history is in %s", file.Name())
}

// events is the whole history, in order.
func (p *proof) events() []history.Event {
	events, err := history.Read(&p.own)
	if err != nil {
		p.t.Fatal(err)
	}
	workers, err := p.recorded()
	if err != nil {
		p.t.Fatal(err)
	}
	events = append(events, workers...)
	history.Sort(events)
	return events
}

// recorded is what the workers have written down so far.
func (p *proof) recorded() (events []history.Event, err error) {
	files, err := filepath.Glob(filepath.Join(p.dir, "*"))
	for _, name := range files {
		var text []byte
		var more []history.Event
		if text, err = os.ReadFile(name); err == nil {
			more, err = history.Read(bytes.NewReader(text))
		}
		if err != nil {
			break
		}
		events = append(events, more...)
	}
	return events, err
}

// written is the log of the guarded writes.
func (p *proof) written() (log []history.Written) {
	rows, err := p.db.Query("SELECT primitive, key, owner, token, what FROM proof_log ORDER BY seq")
	if err != nil {
		p.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var w history.Written
		if err := rows.Scan(&w.Primitive, &w.Key, &w.Owner, &w.Token, &w.What); err != nil {
			p.t.Fatal(err)
		}
		log = append(log, w)
	}
	if err := rows.Err(); err != nil {
		p.t.Fatal(err)
	}
	return log
}

// acquireAll acquires everything that ends by itself once more: a token that went back is seen even
// if nobody has asked for it since. An attempt may fail on a busy machine, or find what
// a worker has left behind: only patience ends.
func (p *proof) acquireAll() {
	c := newCoord(p.t, p.db, p.dialect, p.config())
	for _, prim := range primitives {
		if prim.lasting {
			continue
		}
		a, err := prim.actor(c, p.db, "judge", 20*proofTTL) // It has no reason to hurry.
		if err != nil {
			p.t.Fatal(err)
		}
		for k := range proofKeys {
			e := history.Event{Kind: history.Acquire, Primitive: prim.name, Key: fmt.Sprint("k", k), Owner: "judge"}
			var h held
			for end := time.Now().Add(proofPatience); h == nil; pause(p.t.Context(), 10*time.Millisecond) {
				e.Sent = history.Now()
				if h, err = a.acquire(p.t.Context(), e.Key); err != nil && time.Now().After(end) {
					p.t.Fatalf("what is left behind does not expire: %v", err)
				}
			}
			e.Token, e.Until = h.token(), history.Shared(h.until())
			if err := p.rec.Record(e); err != nil {
				p.t.Fatal(err)
			}
			if err := h.release(p.t.Context(), p.db); err != nil {
				p.t.Error(err)
			}
		}
	}
}

// lostReservations compares what the log says of each key in the end with what the
// store says.
func (p *proof) lostReservations() (wrong []history.Violation) {
	s := newCoord(p.t, p.db, p.dialect, p.config()).Reservations()
	last := map[string]history.Written{}
	for _, w := range p.written() {
		if w.Primitive == "reservation" {
			last[w.Key] = w
		}
	}
	for key, w := range last {
		found, _, err := s.Find(p.t.Context(), proofScope, key)
		if err != nil {
			p.t.Fatal(err)
		}
		if found.Confirmed != (w.What == "confirm") || found.Confirmed && found.Owner.ID != w.Owner {
			wrong = append(wrong, history.Violation{Wrong: history.LostReservation, Primitive: "reservation", Key: key,
				Text: fmt.Sprintf("the last that was written is %q by %s, and it is %+v", w.What, w.Owner, found)})
		}
	}
	return wrong
}

// proofRow is one primitive's line of a run.
type proofRow struct {
	fault, driver, primitive                     string
	acquired, lost, written, refused, violations int
}

func (r *proofRow) count(events []history.Event, wrong []history.Violation) {
	by := map[history.Kind]int{}
	for _, e := range events {
		if e.Primitive == r.primitive {
			by[e.Kind]++
		}
	}
	r.acquired, r.lost, r.written, r.refused = by[history.Acquire], by[history.Lost], by[history.Write], by[history.Refused]
	for _, v := range wrong {
		if v.Primitive == r.primitive {
			r.violations++
		}
	}
}

// proofTable is what all runs have come to.
type proofTable struct {
	mu   sync.Mutex
	rows []proofRow
}

func (t *proofTable) add(rows []proofRow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows = append(t.rows, rows...)
}

// String is a table in Markdown: all lines, and then the sum of each fault's.
func (t *proofTable) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var text bytes.Buffer
	w := tabwriter.NewWriter(&text, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| fault\t| driver\t| primitive\t| acquired\t| lost\t| guarded writes\t| refused\t| violations\t|")
	fmt.Fprintln(w, "|---\t|---\t|---\t|---:\t|---:\t|---:\t|---:\t|---:\t|")
	var sums []proofRow
	for _, r := range t.rows {
		fmt.Fprintf(w, "| %s\t| %s\t| %s\t%s\n", r.fault, r.driver, r.primitive, r.numbers())
		if len(sums) == 0 || sums[len(sums)-1].fault != r.fault {
			sums = append(sums, proofRow{fault: r.fault})
		}
		sums[len(sums)-1].add(r)
	}
	w.Flush()
	fmt.Fprintln(w, "\n| fault\t| acquired\t| lost\t| guarded writes\t| refused\t| violations\t|")
	fmt.Fprintln(w, "|---\t|---:\t|---:\t|---:\t|---:\t|---:\t|")
	for _, r := range sums {
		fmt.Fprintf(w, "| %s\t%s\n", r.fault, r.numbers())
	}
	w.Flush()
	return text.String()
}

func (r *proofRow) numbers() string {
	return fmt.Sprintf("| %d\t| %d\t| %d\t| %d\t| %d\t|", r.acquired, r.lost, r.written, r.refused, r.violations)
}

func (r *proofRow) add(other proofRow) {
	r.acquired += other.acquired
	r.lost += other.lost
	r.written += other.written
	r.refused += other.refused
	r.violations += other.violations
}
