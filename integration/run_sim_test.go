package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-4c80c132/coord"
)

// A simulation runs nodes of one group in a synctest bubble, where time is fake, on
// SQLite in memory, with that time for the clock that judges expiry.
type simulation struct {
	url        string
	db         *sql.DB
	leases     *coord.LeaseStore
	partitions int
	slow       time.Duration // the most that fn takes to return; less than the margin

	mu       sync.Mutex
	nodes    map[string]*simulated // those that live
	running  map[int]string        // the node that has fn running, by partition
	starts   int
	wrong    []string
	finished sync.WaitGroup
}

const (
	simTTL       = 3 * time.Second
	simHeartbeat = time.Second
	simTrip      = 10 * time.Millisecond // the most that a statement takes to arrive, and its reply
)

// simulated is a node: a process with a connection that can be bad.
type simulated struct {
	name string
	s    *simulation
	end  context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	stalled time.Time // until when its statements hang
	failing time.Time // until when they fail
	dead    bool
}

// simulate runs a script in a bubble and returns what went wrong.
func simulate(t *testing.T, partitions int, slow time.Duration, script func(*simulation)) (wrong []string) {
	synctest.Test(t, func(t *testing.T) {
		s := &simulation{url: memoryDSN(t), partitions: partitions, slow: slow, nodes: map[string]*simulated{}, running: map[int]string{}}
		db, err := sql.Open("sqlite", s.url)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		c, err := coord.New(db, coord.SQLite, coord.Config{Clock: time.Now})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s.db, s.leases = db, c.Leases()
		if err := c.Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		script(s)
		for _, name := range s.names() {
			s.leave(name)
		}
		s.finished.Wait()
		wrong = s.wrong
	})
	return wrong
}

func (s *simulation) fail(format string, args ...any) {
	s.wrong = append(s.wrong, fmt.Sprintf(format, args...))
}

func (s *simulation) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.nodes))
}

// join starts a node.
func (s *simulation) join(name string) {
	ctx, cancel := context.WithCancel(context.Background())
	n := &simulated{name: name, s: s, end: cancel, done: make(chan struct{})}
	s.mu.Lock()
	s.nodes[name] = n
	s.mu.Unlock()
	s.finished.Go(func() {
		defer close(n.done)
		db := sql.OpenDB(n)
		defer db.Close()
		c, err := coord.New(db, coord.SQLite, coord.Config{Clock: time.Now, NoPrepare: true, Timeout: time.Second})
		if err != nil {
			panic(err)
		}
		defer c.Close()
		cfg := coord.PartitionConfig{Service: "sim", Node: name, Group: "g", Partitions: s.partitions, TTL: simTTL, Heartbeat: simHeartbeat}
		err = c.RunPartitions(ctx, cfg, n.work)
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil && !errors.Is(err, context.Canceled) && !n.bad() { // It may have been told to leave before it began.
			s.fail("%s ended: %v", name, err)
		}
	})
}

// leave ends a node in order and waits until it has.
func (s *simulation) leave(name string) {
	s.mu.Lock()
	n := s.nodes[name]
	delete(s.nodes, name)
	s.mu.Unlock()
	n.end()
	<-n.done
}

// crash ends a node as kill -9 does: nothing of it reaches the database any more,
// and none of its fns works.
func (s *simulation) crash(name string) {
	s.mu.Lock()
	n := s.nodes[name]
	delete(s.nodes, name)
	n.mu.Lock()
	n.dead = true
	n.mu.Unlock()
	maps.DeleteFunc(s.running, func(_ int, owner string) bool { return owner == name })
	s.mu.Unlock()
	n.end()
}

// impair lets a node's statements hang or fail for a while.
func (s *simulation) impair(name string, hang bool, d time.Duration) {
	s.mu.Lock()
	n := s.nodes[name]
	s.mu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	if hang {
		n.stalled = time.Now().Add(d)
	} else {
		n.failing = time.Now().Add(d)
	}
}

// settle waits until membership has been quiet for TTL and two heartbeats, and
// checks that all is well then. It returns the shares.
func (s *simulation) settle() map[string]int {
	time.Sleep(simTTL + 2*simHeartbeat)
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	shares := map[string]int{}
	for _, name := range s.running {
		shares[name]++
	}
	least, most := s.partitions, 0
	for name := range s.nodes {
		least, most = min(least, shares[name]), max(most, shares[name])
	}
	if len(s.nodes) > 0 && (len(s.running) != s.partitions || most-least > 1) {
		s.fail("after a quiet time the shares of %d nodes in %d partitions are %v", len(s.nodes), s.partitions, shares)
	}
	return shares
}

// counted is how many starts of fn an event has brought about when all is quiet again.
func (s *simulation) counted(event func()) int {
	s.mu.Lock()
	before := s.starts
	s.mu.Unlock()
	event()
	s.settle()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.starts - before
}

// bad tells whether the node's way to the database is or was interrupted.
func (n *simulated) bad() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dead || !n.stalled.IsZero() || !n.failing.IsZero()
}

// work is fn: it must be alone with its partition, at every moment.
func (n *simulated) work(ctx context.Context, lease coord.Lease) error {
	if !n.begin(lease.Partition) {
		return nil
	}
	<-ctx.Done()
	time.Sleep(rand.N(n.s.slow + 1))
	n.s.mu.Lock()
	defer n.s.mu.Unlock()
	if n.s.running[lease.Partition] == n.name {
		delete(n.s.running, lease.Partition)
	}
	return ctx.Err()
}

func (n *simulated) begin(partition int) bool {
	n.s.mu.Lock()
	defer n.s.mu.Unlock()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dead {
		return false
	}
	n.s.starts++
	if other := n.s.running[partition]; other != "" {
		n.s.fail("partition %d runs on %s and on %s", partition, other, n.name)
	}
	n.s.running[partition] = n.name
	return true
}

// gate lets a statement through, which takes its time on the way and on the way back,
// or holds it up, or cuts its connection, on either way.
func (n *simulated) gate(do func() error) error {
	time.Sleep(rand.N(simTrip))
	defer func() { time.Sleep(rand.N(simTrip)) }()
	if before := rand.N(2) == 0; before {
		if err := n.interrupt(); err != nil {
			return err
		}
		return do()
	}
	n.mu.Lock()
	dead := n.dead
	n.mu.Unlock()
	if dead {
		return driver.ErrBadConn
	}
	if err := do(); err != nil {
		return err
	}
	return n.interrupt()
}

func (n *simulated) interrupt() error {
	n.mu.Lock()
	hang, fail, dead := time.Until(n.stalled), time.Until(n.failing), n.dead
	n.mu.Unlock()
	if hang > 0 && !dead {
		time.Sleep(hang)
		return n.interrupt()
	}
	if fail > 0 || dead {
		return driver.ErrBadConn
	}
	return nil
}

func (n *simulated) Driver() driver.Driver { return n.s.db.Driver() }

func (n *simulated) Connect(context.Context) (driver.Conn, error) {
	if err := n.interrupt(); err != nil {
		return nil, err
	}
	conn, err := n.Driver().Open(n.s.url)
	return &badLine{conn, n}, err
}

// badLine is a connection of a simulated node.
type badLine struct {
	driver.Conn
	n *simulated
}

// QueryContext reads all rows before the line can hang: a statement that is open
// would keep SQLite locked for all nodes.
func (c *badLine) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	all := &readRows{}
	err := c.n.gate(func() error {
		rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
		if err != nil {
			return err
		}
		defer rows.Close()
		return all.read(rows)
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// readRows are rows that have been read.
type readRows struct {
	columns []string
	rows    [][]driver.Value
}

func (r *readRows) read(rows driver.Rows) error {
	for r.columns = rows.Columns(); ; {
		row := make([]driver.Value, len(r.columns))
		switch err := rows.Next(row); {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
		r.rows = append(r.rows, row)
	}
}

func (r *readRows) Columns() []string { return r.columns }
func (r *readRows) Close() error      { return nil }
func (r *readRows) Next(to []driver.Value) error {
	if len(r.rows) == 0 {
		return io.EOF
	}
	copy(to, r.rows[0])
	r.rows = r.rows[1:]
	return nil
}

func (c *badLine) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (result driver.Result, err error) {
	err = c.n.gate(func() error {
		result, err = c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
		return err
	})
	return result, err
}

func (c *badLine) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

// step is one event of a script.
type step struct {
	kind  string // "join", "leave", "crash", "stall" or "cut"
	which int
	pause time.Duration // after it
	lasts time.Duration // of a stall or a cut
}

// TestRunProperty: whatever joins, leaves, crashes and bad connections come together,
// no partition has two fns running at any moment, and once membership has been quiet
// for TTL and two heartbeats, all are owned and shares differ by at most one. A lone
// change moves exactly what it must.
func TestRunProperty(t *testing.T) {
	began, failed := time.Now(), false
	asked := flag.Lookup("rapid.checks").Value.String() != "100" // for more than belongs in every run
	rapid.Check(t, func(r *rapid.T) {
		if !asked && !failed && time.Since(began) > 6*time.Second {
			return
		}
		partitions := rapid.IntRange(1, 12).Draw(r, "partitions")
		slow := time.Duration(rapid.IntRange(0, 200).Draw(r, "slow")) * time.Millisecond
		rounds := rapid.SliceOfN(rapid.SliceOfN(rapid.Custom(drawStep), 1, 5), 1, 6).Draw(r, "rounds")
		wrong := simulate(t, partitions, slow, func(s *simulation) {
			s.join("n0")
			s.settle()
			for i, round := range rounds {
				if len(s.wrong) == 0 {
					s.play(fmt.Sprintf("n%d", i+1), round)
				}
			}
		})
		if failed = len(wrong) > 0; failed {
			r.Fatalf("%s", strings.Join(wrong, "\n"))
		}
	})
}

func drawStep(r *rapid.T) step {
	return step{
		kind:  rapid.SampledFrom([]string{"join", "join", "join", "leave", "crash", "stall", "cut"}).Draw(r, "kind"),
		which: rapid.IntRange(0, 9).Draw(r, "which"),
		pause: time.Duration(rapid.IntRange(0, 1500).Draw(r, "pause")) * time.Millisecond,
		lasts: time.Duration(rapid.IntRange(100, 6000).Draw(r, "lasts")) * time.Millisecond,
	}
}

// play plays the events of a round, and waits for quiet. An event that is alone is
// counted.
func (s *simulation) play(round string, steps []step) {
	if len(steps) > 1 || steps[0].kind == "stall" || steps[0].kind == "cut" {
		var calm time.Time
		for i, step := range steps {
			s.apply(fmt.Sprint(round, "-", i), step)
			if end := time.Now().Add(step.lasts); (step.kind == "stall" || step.kind == "cut") && end.After(calm) {
				calm = end
			}
			time.Sleep(step.pause)
		}
		time.Sleep(time.Until(calm))
		s.settle()
		return
	}
	before, n := s.settle(), len(s.names())
	var name string
	moved := s.counted(func() { name = s.apply(round, steps[0]) })
	var want int
	switch steps[0].kind {
	case "join":
		want = s.partitions / (n + 1)
	case "leave", "crash":
		want = before[name]
	}
	if name != "" && len(s.wrong) == 0 && moved != want {
		s.fail("%s of %s among %d nodes with %v has moved %d of %d partitions, want %d", steps[0].kind, name, n, before, moved, s.partitions, want)
	}
}

// apply makes an event happen, to the node that it returns, or to none.
func (s *simulation) apply(newcomer string, step step) string {
	names := s.names()
	name := names[step.which%len(names)]
	alone := len(names) == 1 // Somebody must stay.
	switch {
	case step.kind == "join":
		newcomer = fmt.Sprintf("%c-%s", 'a'+step.which*2, newcomer) // Names have nothing to do with ages.
		s.join(newcomer)
		return newcomer
	case step.kind == "stall", step.kind == "cut":
		s.impair(name, step.kind == "stall", step.lasts)
	case alone:
		return ""
	case step.kind == "leave":
		s.leave(name)
	case step.kind == "crash":
		s.crash(name)
	}
	return name
}
