package integration

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// mark is a moment in the life of an fn, as its process tells it.
type mark struct {
	What      string // "start", "end", and of a guarded write "written" or "refused"
	Node      string
	Partition int
	Epoch     int64
	At        time.Time // by this machine's clock
	Cause     string    // of the end of fn's context
}

// marks are those of several nodes.
type marks struct {
	mu  sync.Mutex
	all []mark
}

func (m *marks) add(one mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all = append(m.all, one)
}

func (m *marks) list() []mark {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.all)
}

// running is which node has each partition, by the starts and ends so far.
func (m *marks) running() map[int]string {
	running := map[int]string{}
	for _, one := range m.list() {
		switch {
		case one.What == "start":
			running[one.Partition] = one.Node
		case one.What == "end" && running[one.Partition] == one.Node:
			delete(running, one.Partition)
		}
	}
	return running
}

// balanced tells whether these nodes, and no others, have all partitions, in shares
// that differ by at most one.
func (m *marks) balanced(partitions int, nodes ...string) bool {
	shares := map[string]int{}
	running := m.running()
	for _, node := range running {
		shares[node]++
	}
	least, most := partitions, 0
	for _, node := range nodes {
		least, most = min(least, shares[node]), max(most, shares[node])
	}
	others := slices.ContainsFunc(slices.Collect(maps.Keys(shares)), func(node string) bool { return !slices.Contains(nodes, node) })
	return len(running) == partitions && most-least <= 1 && !others
}

// stretch is one fn's time with a partition.
type stretch struct {
	node     string
	epoch    int64
	from, to time.Time // to is zero if no end was told
}

// stretches are those of each partition, in order. The time of a node's stretches
// that are open then ends at its end in ends: it was killed, or stopped.
func (m *marks) stretches(ends map[string]time.Time) map[int][]stretch {
	all := map[int][]stretch{}
	for _, one := range m.list() {
		list := all[one.Partition]
		switch i := slices.IndexFunc(list, func(s stretch) bool { return s.node == one.Node && s.epoch == one.Epoch }); {
		case one.What == "start":
			all[one.Partition] = append(list, stretch{node: one.Node, epoch: one.Epoch, from: one.At})
		case one.What == "end":
			list[i].to = one.At
		}
	}
	for _, list := range all {
		for i := range list {
			end, ended := ends[list[i].node]
			if ended && list[i].from.Before(end) && (list[i].to.IsZero() || list[i].to.After(end)) {
				list[i].to = end
			}
		}
		slices.SortFunc(list, func(a, b stretch) int { return a.from.Compare(b.from) })
	}
	return all
}

// check checks that no partition was ever run by two, that epochs have grown, and
// that none was lost. It returns how long partitions were nobody's, between two.
func (m *marks) check(t *testing.T, partitions int, ends map[string]time.Time) (gaps []time.Duration) {
	t.Helper()
	all := m.stretches(ends)
	for p := range partitions {
		if len(all[p]) == 0 {
			t.Errorf("partition %d was never run", p)
		}
		for i, s := range all[p] {
			if i == 0 {
				continue
			}
			before := all[p][i-1]
			if before.to.IsZero() || s.from.Before(before.to) || s.epoch <= before.epoch {
				t.Errorf("partition %d was run by %+v and by %+v", p, before, s)
			}
			gaps = append(gaps, s.from.Sub(before.to))
		}
	}
	slices.Sort(gaps)
	return gaps
}

// quantiles tells of durations in order.
func quantiles(d []time.Duration) string {
	if len(d) == 0 {
		return "none"
	}
	at := func(part int) time.Duration { return d[min(len(d)*part/100, len(d)-1)].Round(100 * time.Microsecond) }
	return fmt.Sprintf("%d, p50 %v, p99 %v, max %v", len(d), at(50), at(99), at(100))
}

// runShare is the role of a process that works on its share of 256 partitions until
// its standard input ends, and tells what it does.
func runShare(o orders, db *sql.DB, c *coord.Coord) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	var mu sync.Mutex
	out := json.NewEncoder(os.Stdout)
	tell := func(what string, lease coord.Lease, cause error) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(mark{what, o.Node, lease.Partition, lease.Epoch, time.Now(), fmt.Sprint(cause)})
	}
	cfg := coord.PartitionConfig{Service: "web", Node: o.Node, Group: "jobs", Partitions: o.Count, TTL: o.TTL}
	return c.RunPartitions(ctx, cfg, func(ctx context.Context, lease coord.Lease) error {
		tell("start", lease, nil)
		<-ctx.Done()
		tell("end", lease, context.Cause(ctx))
		if errors.Is(context.Cause(ctx), coord.ErrLost) {
			if err := guardedWrite(db, c, lease); errors.Is(err, coord.ErrLost) {
				tell("refused", lease, nil)
			} else {
				tell("written", lease, err)
			}
		}
		return nil
	})
}

// guardedWrite writes under a lease, if it is held.
func guardedWrite(db *sql.DB, c *coord.Coord, lease coord.Lease) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := c.Leases().Guard(ctx, tx, lease); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE written SET n = n + 1"); err != nil {
		return err
	}
	return tx.Commit()
}

// crowd is several processes that share partitions.
type crowd struct {
	t          *testing.T
	e          *env
	partitions int
	ttl        time.Duration
	marks      marks
	processes  map[string]*process
	readers    map[string]chan struct{} // closed when a process has told all
}

func newCrowd(t *testing.T, e *env, ttl time.Duration) *crowd {
	e.exec(t, "CREATE TABLE written (n bigint); INSERT INTO written VALUES (0)")
	if err := e.coord(t).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &crowd{t: t, e: e, partitions: 256, ttl: ttl, processes: map[string]*process{}, readers: map[string]chan struct{}{}}
}

// add starts a process.
func (c *crowd) add(node string) {
	p := c.e.start(c.t, "runner", orders{Node: node, Count: c.partitions, TTL: c.ttl})
	told := make(chan struct{})
	c.processes[node], c.readers[node] = p, told
	go func() {
		defer close(told)
		for p.lines.Scan() {
			var m mark
			if err := json.Unmarshal(p.lines.Bytes(), &m); err == nil { // The last line of one that is killed may be torn.
				c.marks.add(m)
			}
		}
	}()
}

// leave ends a process in order.
func (c *crowd) leave(node string) {
	c.t.Helper()
	p := c.processes[node]
	p.stdin.Close()
	<-c.readers[node]
	if err := p.cmd.Wait(); err != nil {
		c.t.Errorf("%s: %v\n%s", node, err, p.errors.Bytes())
	}
	delete(c.processes, node)
}

// balance waits until all is well among these nodes, and returns how long that took.
func (c *crowd) balance(nodes ...string) time.Duration {
	c.t.Helper()
	began := time.Now()
	eventually(c.t, fmt.Sprint("balance among ", nodes), func() bool { return c.marks.balanced(c.partitions, nodes...) })
	return time.Since(began)
}

// disband ends every process, and checks that they left nothing.
func (c *crowd) disband() {
	c.t.Helper()
	for _, p := range c.processes {
		p.stdin.Close()
	}
	for node := range c.processes {
		c.leave(node)
	}
	var members, leases int
	c.e.scan(c.t, "SELECT count(*) FROM coord_member WHERE expires_at > clock_timestamp()", &members)
	c.e.scan(c.t, "SELECT count(*) FROM coord_lease WHERE expires_at > clock_timestamp()", &leases)
	if members > 0 || leases > 0 {
		c.t.Errorf("%d members and %d leases are left, want none", members, leases)
	}
}

// only runs a test on one Postgres driver: what several processes do takes time.
func only(t *testing.T, name string, test func(*testing.T, *env)) {
	for _, e := range engines {
		if e.name == name {
			test(t, newEnv(t, e, nil))
		}
	}
}

var eight = []string{"n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"}

// TestRunProcesses: eight processes share 256 partitions. Two are killed, one is
// stopped for longer than its TTL and then goes on.
func TestRunProcesses(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		c := newCrowd(t, e, 4*time.Second)
		for _, node := range eight {
			c.add(node)
		}
		t.Logf("eight processes started and balanced in %v", c.balance(eight...))
		ends := map[string]time.Time{}
		for _, node := range eight[:2] {
			ends[node] = time.Now()
			c.processes[node].cmd.Process.Kill()
			<-c.readers[node]
			c.processes[node].cmd.Wait()
			delete(c.processes, node)
		}
		ends["n3"] = time.Now()
		if err := suspend(c.processes["n3"].cmd.Process); err != nil {
			t.Fatal(err)
		}
		held := len(c.runningOn("n3"))
		eventually(t, "others have everything", func() bool { return c.takenOver(ends) })
		t.Logf("took over from two killed and one stopped %v after the first kill; TTL %v, heartbeat %v", time.Since(ends["n1"]), c.ttl, c.ttl/3)

		woken := time.Now()
		if err := resume(c.processes["n3"].cmd.Process); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the stopped one's fns have ended and written in vain", func() bool { return c.count("refused", "n3") == held })
		var last time.Duration
		for _, m := range c.marks.list() {
			if m.What == "end" && m.Node == "n3" && m.At.After(woken) && m.Cause == coord.ErrLost.Error() {
				last = max(last, m.At.Sub(woken))
			}
		}
		t.Logf("its %d fns' contexts had ended %v after waking", held, last)
		if last > c.ttl {
			t.Errorf("the last context ended %v after waking, want at once", last)
		}
		c.balance(eight[2:]...)
		t.Logf("balanced among six %v after waking", time.Since(woken))
		c.disband()
		c.marks.check(t, c.partitions, ends)
		var written int
		if e.scan(t, "SELECT n FROM written", &written); written > 0 || c.count("written", "n3") > 0 {
			t.Errorf("%d guarded writes by one who had lost its leases, want none", written)
		}
	})
}

func (c *crowd) runningOn(node string) (partitions []int) {
	for p, n := range c.marks.running() {
		if n == node {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// takenOver tells whether every partition runs on a node that has not ended.
func (c *crowd) takenOver(ends map[string]time.Time) bool {
	running := c.marks.running()
	for _, node := range running {
		if _, ended := ends[node]; ended {
			return false
		}
	}
	return len(running) == c.partitions
}

func (c *crowd) count(what, node string) (n int) {
	for _, m := range c.marks.list() {
		if m.What == what && m.Node == node {
			n++
		}
	}
	return n
}

// TestRunRollingRestart: each of eight processes is replaced, one after the other. No
// partition is nobody's for long, and each restart moves few.
func TestRunRollingRestart(t *testing.T) {
	only(t, "postgres-pq", func(t *testing.T, e *env) {
		c := newCrowd(t, e, 15*time.Second)
		for _, node := range eight {
			c.add(node)
		}
		c.balance(eight...)
		moved := len(c.marks.list())
		first := time.Now()
		nodes := slices.Clone(eight)
		for i, node := range eight {
			c.leave(node)
			nodes[i] = "new-" + node
			c.balance(slices.Concat(nodes[:i], nodes[i+1:])...)
			c.add(nodes[i])
			c.balance(nodes...)
		}
		took := time.Since(first)
		moved = (len(c.marks.list()) - moved) / 2
		c.disband()
		gaps := c.marks.since(t, c.partitions, first)
		t.Logf("eight restarts in %v, %d moves of 256 partitions; time that one was nobody's: %s", took, moved, quantiles(gaps))
		if want := 8 * (32 + 32); moved != want { // The leaver's share, and then the newcomer's: 256/8 both.
			t.Errorf("%d moves, want %d", moved, want)
		}
		if p99 := gaps[len(gaps)*99/100]; p99 > 5*time.Second {
			t.Errorf("p99 of the time that a partition was nobody's is %v, want far less than the TTL", p99)
		}
	})
}

// since is check, and the gaps between stretches that began after a moment, in order.
func (m *marks) since(t *testing.T, partitions int, moment time.Time) (gaps []time.Duration) {
	t.Helper()
	m.check(t, partitions, nil)
	for _, list := range m.stretches(nil) {
		for i, s := range list {
			if i > 0 && s.from.After(moment) {
				gaps = append(gaps, s.from.Sub(list[i-1].to))
			}
		}
	}
	slices.SortFunc(gaps, cmp.Compare)
	return gaps
}

// node runs partitions in this process until end is called.
type node struct {
	end func() error
}

// runNode starts a node that tells marks what it does.
func runNode(t *testing.T, c *coord.Coord, name string, partitions int, ttl time.Duration, m *marks) *node {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		cfg := coord.PartitionConfig{Service: "web", Node: name, Group: "jobs", Partitions: partitions, TTL: ttl}
		done <- c.RunPartitions(ctx, cfg, func(ctx context.Context, lease coord.Lease) error {
			m.add(mark{What: "start", Node: name, Partition: lease.Partition, Epoch: lease.Epoch, At: time.Now()})
			<-ctx.Done()
			m.add(mark{What: "end", Node: name, Partition: lease.Partition, Epoch: lease.Epoch, At: time.Now(), Cause: context.Cause(ctx).Error()})
			return nil
		})
	}()
	n := &node{end: sync.OnceValue(func() error { cancel(); return <-done })}
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	})
	return n
}

// TestRunStrandedPartition: what was dealt to a node that can't take it, since its fn
// goes on in spite of a loss, goes to another in the end, and that keeps it.
func TestRunStrandedPartition(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		const ttl = 2 * time.Second
		var m marks
		release := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			cfg := coord.PartitionConfig{Service: "web", Node: "stuck", Group: "jobs", Partitions: 4, TTL: ttl}
			done <- e.coord(t).RunPartitions(ctx, cfg, func(ctx context.Context, lease coord.Lease) error {
				m.add(mark{What: "start", Node: "stuck", Partition: lease.Partition, Epoch: lease.Epoch, At: time.Now()})
				<-ctx.Done()
				if lease.Partition == 0 {
					<-release
				}
				m.add(mark{What: "end", Node: "stuck", Partition: lease.Partition, Epoch: lease.Epoch, At: time.Now(), Cause: context.Cause(ctx).Error()})
				return nil
			})
		}()
		defer func() { close(release); cancel(); <-done }()
		eventually(t, "it has all", func() bool { return len(m.list()) == 4 })
		var others marks
		runNode(t, newCoord(t, e.open(t), e.dialect, e.config()), "other", 4, ttl, &others)
		eventually(t, "two share", func() bool { return len(others.list()) == 2 })
		e.exec(t, "UPDATE coord_lease SET expires_at = 'epoch' WHERE partition = 0")
		eventually(t, "another has taken it", func() bool { return others.running()[0] == "other" })
		time.Sleep(2 * ttl)
		if running := others.running(); running[0] != "other" || len(running) > 3 {
			t.Errorf("the other works on %v, want 0 and what it had", running)
		}
	})
}

// TestRunSuccessorOfTheSameName: what a process gives up in the end is not what another
// of its node name has taken over.
func TestRunSuccessorOfTheSameName(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		const ttl = 10 * time.Second
		var before, after marks
		old := runNode(t, newCoord(t, e.open(t), e.dialect, e.config()), "a", 8, ttl, &before)
		eventually(t, "the old one has all", func() bool { return before.balanced(8, "a") })
		runNode(t, newCoord(t, e.open(t), e.dialect, e.config()), "a", 8, ttl, &after)
		eventually(t, "the new one has all", func() bool { return after.balanced(8, "a") })
		_ = old.end()
		owners, err := e.coord(t).Leases().Owners(t.Context(), "jobs")
		if err != nil || len(owners) != 8 {
			t.Errorf("%d partitions are owned, %v, want all 8", len(owners), err)
		}
	})
}

// TestRunDoneIsDone: fn that has returned nil is not called again, though the lease
// was lost and comes back.
func TestRunDoneIsDone(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		var calls atomic.Int64
		c := e.coord(t)
		go func() {
			done <- c.RunLeader(ctx, "leader", 2*time.Second, func(context.Context, coord.Lease) error { calls.Add(1); return nil })
		}()
		eventually(t, "it is called", func() bool { return calls.Load() == 1 })
		e.exec(t, "UPDATE coord_lease SET expires_at = 'epoch'")
		eventually(t, "the lease is had back", func() bool {
			owners, err := c.Leases().Owners(t.Context(), "leader")
			return err == nil && len(owners) == 1 && owners[0].Epoch > 1
		})
		time.Sleep(200 * time.Millisecond) // For a call that should not come.
		cancel()
		if err := <-done; err != nil || calls.Load() != 1 {
			t.Errorf("%d calls, %v, want one", calls.Load(), err)
		}
	})
}

// TestRunCloseIsNoLoss: the cause of an fn's end is that the Coord was closed, also if
// a renewal finds out first.
func TestRunCloseIsNoLoss(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for round := range 60 {
			wg.Go(func() {
				c := newCoord(t, e.db, e.dialect, e.config())
				name := fmt.Sprint("g", round)
				started := make(chan struct{})
				go func() {
					<-started
					time.Sleep(time.Duration(round) * 100 * time.Microsecond)
					c.Close()
				}()
				cfg := coord.PartitionConfig{Service: name, Group: name, Partitions: 1, TTL: 2 * time.Second, Heartbeat: 3 * time.Millisecond}
				err := c.RunPartitions(t.Context(), cfg, func(ctx context.Context, _ coord.Lease) error {
					close(started)
					<-ctx.Done()
					if cause := context.Cause(ctx); !errors.Is(cause, coord.ErrClosed) {
						t.Errorf("the cause is %v, want ErrClosed", cause)
					}
					return nil
				})
				if !errors.Is(err, coord.ErrClosed) {
					t.Errorf("RunPartitions = %v, want ErrClosed", err)
				}
			})
			if round%10 == 9 {
				wg.Wait()
			}
		}
	})
}

// TestRunEngines: joins and leaves, on every engine.
func TestRunEngines(t *testing.T) {
	each(t, func(t *testing.T, e *env) { // The given clock stands still, and nothing here needs it to go on.
		var m marks
		const partitions = 7
		nodes := map[string]*node{}
		for _, name := range []string{"a", "b", "c"} {
			nodes[name] = runNode(t, newCoord(t, e.open(t), e.dialect, e.config()), name, partitions, 10*time.Second, &m)
		}
		eventually(t, "three share", func() bool { return m.balanced(partitions, "a", "b", "c") })
		if err := nodes["b"].end(); err != nil {
			t.Errorf("b ended: %v", err)
		}
		eventually(t, "two share", func() bool { return m.balanced(partitions, "a", "c") })
		for _, name := range []string{"a", "c"} {
			if err := nodes[name].end(); err != nil {
				t.Errorf("%s ended: %v", name, err)
			}
		}
		m.check(t, partitions, nil)
		c := e.coord(t)
		members, err := c.Members().List(t.Context(), "web")
		if leases, err2 := c.Leases().Owners(t.Context(), "jobs"); len(members)+len(leases) > 0 || err != nil || err2 != nil {
			t.Errorf("left behind: %v, %v, %v, %v", members, leases, err, err2)
		}
	})
}

// TestRunLeader: one leads at a time, and the next as soon as it has returned.
func TestRunLeader(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		var leaders sync.Map
		var leads sync.Mutex // Held by who leads.
		cancels := map[string]context.CancelFunc{}
		var wg sync.WaitGroup
		for _, name := range []string{"a", "b", "c"} {
			cfg := e.config()
			cfg.Owner = name
			c := newCoord(t, e.open(t), e.dialect, cfg)
			ctx, cancel := context.WithCancel(t.Context())
			cancels[name] = cancel
			wg.Go(func() {
				err := c.RunLeader(ctx, "reports", 10*time.Second, func(ctx context.Context, lease coord.Lease) error {
					if !leads.TryLock() {
						t.Errorf("%s leads while another does", name)
						return nil
					}
					defer leads.Unlock()
					leaders.Store(lease.Epoch, name)
					<-ctx.Done()
					return nil
				})
				if err != nil {
					t.Errorf("RunLeader of %s = %v", name, err)
				}
			})
		}
		for epoch := range int64(3) {
			var leader any
			eventually(t, "a leader", func() (ok bool) { leader, ok = leaders.Load(epoch + 1); return ok })
			cancels[leader.(string)]()
		}
		wg.Wait()
	})
}

// TestRunDatabaseRestart: the server crashes and is away for two seconds. With a TTL
// of fifteen, no fn is interrupted.
func TestRunDatabaseRestart(t *testing.T) {
	for _, e := range engines {
		if !e.postgres() || e.pooler {
			continue
		}
		t.Run(e.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			t.Cleanup(func() { goleak.VerifyNone(t, before) })
			server := testdb.NewCluster(t)
			env := &env{engine: e, url: server.URL()}
			var m marks
			const partitions = 64
			names := []string{"a", "b", "c", "d"}
			for _, name := range names {
				cfg := env.config()
				cfg.Timeout = 5 * time.Second
				runNode(t, newCoord(t, env.open(t), env.dialect, cfg), name, partitions, 15*time.Second, &m)
			}
			eventually(t, "four share", func() bool { return m.balanced(partitions, names...) })
			quiet := len(m.list())
			server.Stop(t)
			time.Sleep(2 * time.Second)
			server.Start(t)
			back := time.Now()
			probe := env.open(t)
			eventually(t, "every lease and every member is renewed", func() (renewed bool) {
				err := probe.QueryRow("SELECT (SELECT count(*) FROM coord_lease WHERE expires_at > $1) = $2 AND (SELECT count(*) FROM coord_member WHERE expires_at > $1) = 4",
					back.Add(15*time.Second), partitions).Scan(&renewed)
				return err == nil && renewed
			})
			t.Logf("all was renewed %v after the server was back", time.Since(back))
			if after := m.list()[quiet:]; len(after) > 0 {
				t.Errorf("after the restart: %+v, want no fn interrupted", after)
			}
		})
	}
}

// TestRunOpenGuard: a partition whose former owner's guarded transaction is still open
// is waited for, and the node's other fns go on meanwhile.
func TestRunOpenGuard(t *testing.T) {
	only(t, "postgres-pgx", func(t *testing.T, e *env) {
		dead := e.coord(t).Leases()
		for p := range 4 {
			if _, err := dead.Acquire(t.Context(), "jobs", p, "dead", time.Second); err != nil {
				t.Fatal(err)
			}
		}
		lease, err := dead.Acquire(t.Context(), "jobs", 0, "dead", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if err := dead.Guard(t.Context(), tx, lease); err != nil {
			t.Fatal(err)
		}
		var m marks
		runNode(t, newCoord(t, e.open(t), e.dialect, e.config()), "a", 4, 3*time.Second, &m) // A statement that waited would wait for 30 s.
		eventually(t, "the others are taken over", func() bool { return len(m.list()) == 3 })
		time.Sleep(5 * time.Second) // Longer than a lease lasts that is not renewed.
		if running := m.running(); len(m.list()) != 3 || running[0] != "" {
			t.Errorf("while the guard is open: %+v, want three that go on", m.list())
		}
		tx.Rollback()
		eventually(t, "the partition is taken over", func() bool { return m.balanced(4, "a") })
	})
}
