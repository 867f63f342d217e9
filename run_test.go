package coord

import (
	"bytes"
	"cmp"
	"context"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lib/pq"
)

func TestRunPartitionsInvalid(t *testing.T) {
	d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return nil, errors.New("nothing may be sent") }}
	c := newCoord(t, d, Config{})
	work := func(context.Context, Lease) error { return nil }
	good := PartitionConfig{Service: "web", Group: "jobs", Partitions: 3}
	for name, spoil := range map[string]func(*PartitionConfig){
		"no service":            func(cfg *PartitionConfig) { cfg.Service = "" },
		"no group":              func(cfg *PartitionConfig) { cfg.Group = "" },
		"NUL in the node":       func(cfg *PartitionConfig) { cfg.Node = "a\x00" },
		"address is no UTF-8":   func(cfg *PartitionConfig) { cfg.Address = "\xff" },
		"no partitions":         func(cfg *PartitionConfig) { cfg.Partitions = 0 },
		"negative partitions":   func(cfg *PartitionConfig) { cfg.Partitions = -1 },
		"short TTL":             func(cfg *PartitionConfig) { cfg.TTL = time.Microsecond },
		"negative TTL":          func(cfg *PartitionConfig) { cfg.TTL = -time.Second },
		"negative Heartbeat":    func(cfg *PartitionConfig) { cfg.Heartbeat = -time.Second },
		"Heartbeat over TTL/2":  func(cfg *PartitionConfig) { cfg.TTL, cfg.Heartbeat = 2*time.Second, 1001*time.Millisecond },
		"Heartbeat of defaults": func(cfg *PartitionConfig) { cfg.Heartbeat = 8 * time.Second },
	} {
		cfg := good
		spoil(&cfg)
		if err := c.RunPartitions(t.Context(), cfg, work); !errors.Is(err, ErrInvalid) {
			t.Errorf("RunPartitions with %s = %v, want ErrInvalid", name, err)
		}
	}
	if err := c.RunPartitions(t.Context(), good, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("RunPartitions without fn = %v, want ErrInvalid", err)
	}
	if err := c.RunLeader(t.Context(), "", 0, work); !errors.Is(err, ErrInvalid) {
		t.Errorf("RunLeader without a name = %v, want ErrInvalid", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.RunPartitions(done, good, work); !errors.Is(err, context.Canceled) {
		t.Errorf("RunPartitions under a context that is done = %v, want context.Canceled", err)
	}
	c.Close()
	if err := c.RunPartitions(t.Context(), good, work); !errors.Is(err, ErrClosed) {
		t.Errorf("RunPartitions after Close = %v, want ErrClosed", err)
	}
	if sent := d.statements(); len(sent) > 0 {
		t.Errorf("%d statements were sent, want none: %v", len(sent), sent)
	}
}

func TestPartitionConfigDefaults(t *testing.T) {
	c := newCoord(t, &fakeDriver{}, Config{Owner: "me"})
	cfg := PartitionConfig{Service: "web", Group: "jobs", Partitions: 1}
	want := PartitionConfig{Service: "web", Node: "me", Group: "jobs", Partitions: 1, TTL: 15 * time.Second, Heartbeat: 5 * time.Second}
	if err := cfg.complete(c); err != nil || cfg != want {
		t.Errorf("complete = %+v, %v, want %+v", cfg, err, want)
	}
}

func TestShare(t *testing.T) {
	for _, test := range []struct {
		name, owners string   // a letter for each partition, "." is free
		members      string   // a letter for each member
		want         []string // for each member: its quota, and what is dealt to it
	}{
		{"first of all", "....", "a", []string{"4 [0 1 2 3]"}},
		{"all at once", ".......", "abc", []string{"3 [0 1 2]", "2 [3 4]", "2 [5 6]"}},
		{"a join", "aaaaabbbbb", "abc", []string{"4 []", "3 []", "3 []"}},
		{"a join, one moved", "aaaa.bbbbb", "abc", []string{"4 []", "3 []", "3 [4]"}},
		{"a join, the other was faster", "aaaaabbb..", "abc", []string{"4 []", "3 []", "3 [8 9]"}},
		{"a join that has no part", "abc", "abcd", []string{"1 []", "1 []", "1 []", "0 []"}},
		{"who has more keeps it", "abbcc", "abc", []string{"1 []", "2 []", "2 []"}},
		{"a leave", "aaab.bc..", "ab", []string{"5 [4 7]", "4 [8]"}},
		{"the dead still have theirs", "aabbxx", "ab", []string{"3 []", "3 []"}},
		{"more nodes than partitions", ".", "abc", []string{"1 [0]", "0 []", "0 []"}},
		{"a leader stays", "b", "abc", []string{"0 []", "1 []", "0 []"}},
	} {
		owners := strings.Split(test.owners, "")
		for i := range owners {
			owners[i] = strings.Trim(owners[i], ".")
		}
		members := strings.Split(test.members, "")
		for i, m := range members {
			quota, dealt := share(owners, members, m)
			if got := fmt.Sprint(quota, " ", dealt); got != test.want[i] {
				t.Errorf("%s: share of %s = %s, want %s", test.name, m, got, test.want[i])
			}
		}
	}
}

// TestShareProperty: from any state, whoever acts first and however far each gets
// before the next looks, shares end balanced, nothing that was dealt to one is dealt
// to another, and no more moves than must.
func TestShareProperty(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 0))
		owners, members := make([]string, 1+rng.IntN(20)), strings.Split("abcdefgh"[:1+rng.IntN(8)], "")
		for p := range owners {
			if k := rng.IntN(len(members) + 1); k < len(members) {
				owners[p] = members[k]
			}
		}
		want := mustMove(owners, members)
		if moved := converge(t, rng, owners, members); moved != want || t.Failed() {
			t.Fatalf("seed %d: %d partitions have moved, want %d", seed, moved, want)
		}
	}
}

// mustMove is how many owned partitions any balanced sharing has to move.
func mustMove(owners, members []string) (least int) {
	held := map[string]int{}
	for _, owner := range owners {
		held[owner]++
	}
	floor, more := len(owners)/len(members), len(owners)%len(members)
	for _, m := range members {
		if held[m] > floor {
			least += held[m] - floor
			if more > 0 {
				least, more = least-1, more-1
			}
		}
	}
	return least
}

// converge lets members act in random order, on a part of what share tells them,
// until nothing changes. It returns how many were given up.
func converge(t *testing.T, rng *rand.Rand, owners, members []string) (moved int) {
	for range 1000 {
		m := members[rng.IntN(len(members))]
		quota, dealt := share(owners, members, m)
		held := 0
		for p, owner := range owners {
			if owner == m {
				if held++; held > quota && rng.IntN(2) == 0 {
					owners[p], held, moved = "", held-1, moved+1
				}
			}
		}
		for _, p := range dealt[:rng.IntN(len(dealt)+1)] {
			if owners[p] != "" {
				t.Errorf("partition %d of %s is dealt to %s", p, owners[p], m)
			}
			owners[p] = m
		}
	}
	checkBalanced(t, owners, members)
	return moved
}

func checkBalanced(t *testing.T, owners, members []string) {
	t.Helper()
	var shares []int
	for _, m := range members {
		shares = append(shares, len(owners)-len(filter(owners, func(owner string) bool { return owner != m })))
	}
	if slices.Contains(owners, "") || slices.Max(shares)-slices.Min(shares) > 1 {
		t.Errorf("%v of %v: shares %v", owners, members, shares)
	}
}

// fakeCluster is a database in memory that knows the statements of leases and
// members, for one group of one service, in a bubble's time.
type fakeCluster struct {
	fakeDriver
	c    *Coord
	logs bytes.Buffer
	// before is called for each statement with its name; its error is the answer.
	before func(name string, args []any) error

	data    sync.Mutex
	leases  map[int]*fakeLease
	members map[string]fakeMember
	sentAs  []string // the names of the statements
}

type fakeLease struct {
	owner   string
	epoch   int64
	expires time.Time
}

type fakeMember struct {
	groups  string
	expires time.Time
}

// newCluster returns a database, and the Coord of node "a" on it.
func newCluster(t *testing.T) *fakeCluster {
	t.Helper()
	f := &fakeCluster{leases: map[int]*fakeLease{}, members: map[string]fakeMember{}}
	f.fakeDriver.answer = f.answer
	f.c = newCoord(t, &f.fakeDriver, Config{Owner: "a", Logger: slog.New(slog.NewTextHandler(f, nil))})
	return f
}

func (f *fakeCluster) names() map[string]string {
	return map[string]string{
		f.c.leases.acquire: "acquire", f.c.leases.renew: "renew", f.c.leases.release: "release", f.c.leases.owners: "owners",
		f.c.leases.undo: "undo", f.c.leases.holder: "holder", f.c.members.heartbeat: "heartbeat", f.c.members.leave: "leave", f.c.members.list: "list",
	}
}

func (f *fakeCluster) answer(s statement) (driver.Rows, error) {
	name, args := f.names()[s.text], make([]any, len(s.args))
	for i, arg := range s.args {
		args[i] = arg.Value
	}
	f.data.Lock()
	f.sentAs = append(f.sentAs, name)
	before := f.before
	f.data.Unlock()
	if before != nil {
		if err := before(name, args); err != nil {
			return nil, err
		}
	}
	f.data.Lock()
	defer f.data.Unlock()
	switch name {
	case "acquire":
		return f.acquire(int(args[1].(int64)), args[2].(string), args[3].(int64)), nil
	case "renew":
		return f.renew(args[1].(string), args[2].(string), args[3].(int64)), nil
	case "release", "undo":
		if l := f.leases[int(args[1].(int64))]; l != nil && l.owner == args[2] && name == "release" {
			l.expires = time.Time{}
		}
	case "owners":
		return f.owners(), nil
	case "heartbeat":
		expires := time.Now().Add(time.Duration(args[4].(int64)) * time.Microsecond)
		f.members[args[1].(string)] = fakeMember{args[3].(string), expires}
		return &listRows{rows: [][]driver.Value{{expires.UnixMicro()}}}, nil
	case "leave":
		delete(f.members, args[1].(string))
	case "list":
		return f.list(), nil
	}
	return noRows{}, nil
}

func (f *fakeCluster) acquire(p int, owner string, ttl int64) driver.Rows {
	l := f.leases[p]
	if l == nil {
		l = &fakeLease{}
		f.leases[p] = l
	}
	if l.owner != owner && l.expires.After(time.Now()) {
		return &listRows{rows: [][]driver.Value{{false, l.owner, l.epoch, l.expires.UnixMicro()}}}
	}
	*l = fakeLease{owner, l.epoch + 1, time.Now().Add(time.Duration(ttl) * time.Microsecond)}
	return &listRows{rows: [][]driver.Value{{true, owner, l.epoch, l.expires.UnixMicro()}}}
}

func (f *fakeCluster) renew(list, owner string, ttl int64) driver.Rows {
	var partitions []int
	if err := json.Unmarshal([]byte(list), &partitions); err != nil {
		panic(err)
	}
	rows := &listRows{}
	for _, p := range partitions {
		if l := f.leases[p]; l.owner == owner && l.expires.After(time.Now()) {
			l.expires = time.Now().Add(time.Duration(ttl) * time.Microsecond)
			rows.rows = append(rows.rows, []driver.Value{int64(p), l.epoch, l.expires.UnixMicro(), true})
		}
	}
	return rows
}

func (f *fakeCluster) owners() driver.Rows {
	rows := &listRows{}
	for _, p := range slices.Sorted(maps.Keys(f.leases)) {
		if l := f.leases[p]; l.expires.After(time.Now()) {
			rows.rows = append(rows.rows, []driver.Value{int64(p), l.owner, l.epoch, l.expires.UnixMicro()})
		}
	}
	return rows
}

func (f *fakeCluster) list() driver.Rows {
	rows := &listRows{}
	for _, node := range slices.Sorted(maps.Keys(f.members)) {
		if m := f.members[node]; m.expires.After(time.Now()) {
			rows.rows = append(rows.rows, []driver.Value{node, "", m.groups, m.expires.UnixMicro()})
		}
	}
	return rows
}

// set changes what the database does, or holds.
func (f *fakeCluster) set(change func()) {
	f.data.Lock()
	defer f.data.Unlock()
	change()
}

// sent counts statements by name.
func (f *fakeCluster) count() map[string]int {
	f.data.Lock()
	defer f.data.Unlock()
	counts := map[string]int{}
	for _, name := range f.sentAs {
		counts[name]++
	}
	return counts
}

// lease and member are rows as they are now; names are the statements so far.
func (f *fakeCluster) lease(p int) fakeLease {
	f.data.Lock()
	defer f.data.Unlock()
	return *f.leases[p]
}

func (f *fakeCluster) member(node string) fakeMember {
	f.data.Lock()
	defer f.data.Unlock()
	return f.members[node]
}

func (f *fakeCluster) sequence() []string {
	f.data.Lock()
	defer f.data.Unlock()
	return slices.Clone(f.sentAs)
}

// log is what was logged so far.
func (f *fakeCluster) log() string {
	f.data.Lock()
	defer f.data.Unlock()
	return f.logs.String()
}

// Write takes the log.
func (f *fakeCluster) Write(text []byte) (int, error) {
	f.data.Lock()
	defer f.data.Unlock()
	return f.logs.Write(text)
}

// joins makes a node of the test's a member for ever.
func (f *fakeCluster) joins(node string) {
	f.set(func() { f.members[node] = fakeMember{`["jobs"]`, time.Now().Add(time.Hour)} })
}

type listRows struct{ rows [][]driver.Value }

func (r *listRows) Columns() []string {
	if len(r.rows) == 0 {
		return nil
	}
	return make([]string, len(r.rows[0]))
}
func (r *listRows) Close() error { return nil }
func (r *listRows) Next(to []driver.Value) error {
	if len(r.rows) == 0 {
		return io.EOF
	}
	copy(to, r.rows[0])
	r.rows = r.rows[1:]
	return nil
}

// event is the start or the end of an fn.
type event struct {
	partition int
	epoch     int64
	at        time.Duration // since the run began
	cause     error         // nil: a start
}

// trial is a run of node "a" in a bubble, with TTL 30 s and Heartbeat 10 s.
type trial struct {
	*fakeCluster
	begun    time.Time
	cancel   context.CancelFunc
	finished chan struct{}
	err      error
	panicked any

	mu     sync.Mutex
	events []event
}

// begin begins a run of so many partitions. An fn that is nil works until its
// context ends.
func (f *fakeCluster) begin(t *testing.T, partitions int, fn func(context.Context, Lease) error) *trial {
	ctx, cancel := context.WithCancel(t.Context())
	r := &trial{fakeCluster: f, begun: time.Now(), cancel: cancel, finished: make(chan struct{})}
	if fn == nil {
		fn = func(ctx context.Context, _ Lease) error { <-ctx.Done(); return ctx.Err() }
	}
	cfg := PartitionConfig{Service: "web", Group: "jobs", Partitions: partitions, TTL: 30 * time.Second}
	go func() {
		defer close(r.finished)
		defer func() { r.panicked = recover() }()
		r.err = f.c.RunPartitions(ctx, cfg, func(ctx context.Context, lease Lease) error {
			r.note(event{lease.Partition, lease.Epoch, time.Since(r.begun), nil})
			ended := func() { r.note(event{lease.Partition, lease.Epoch, time.Since(r.begun), context.Cause(ctx)}) }
			stop := context.AfterFunc(ctx, ended)
			defer func() {
				if stop() && ctx.Err() != nil { // fn was faster.
					ended()
				}
			}()
			return fn(ctx, lease)
		})
	}()
	t.Cleanup(func() { cancel(); <-r.finished })
	return r
}

func (r *trial) note(e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// starts and ends are the events of a partition so far.
func (r *trial) starts(partition int) (starts []event) { return r.some(partition, true) }
func (r *trial) ends(partition int) (ends []event)     { return r.some(partition, false) }

func (r *trial) some(partition int, starts bool) (events []event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.partition == partition && (e.cause == nil) == starts {
			events = append(events, e)
		}
	}
	return events
}

// end ends the run and returns its error, and how long that took.
func (r *trial) end() (time.Duration, error) {
	began := time.Now()
	r.cancel()
	<-r.finished
	synctest.Wait() // Until all events are noted.
	return time.Since(began), r.err
}

func last(list []string, n int) []string { return list[len(list)-n:] }

// TestRunStatements: one heartbeat and one renewal for each node and tick, however
// many partitions; who the others are is looked up often, who owns what seldom; the
// member leaves before it releases anything.
func TestRunStatements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 200, nil)
		time.Sleep(time.Second)
		before := f.count()
		if before["acquire"] != 200 || before["heartbeat"] != 1 {
			t.Errorf("joined by %v, want 200 acquisitions after a heartbeat", before)
		}
		time.Sleep(3 * time.Minute)
		n := f.count()
		maps.DeleteFunc(n, func(name string, _ int) bool { n[name] -= before[name]; return n[name] == 0 })
		for name, limits := range map[string][2]int{"heartbeat": {18, 20}, "renew": {17, 20}, "owners": {5, 7}, "list": {1700, 2600}} {
			if n[name] < limits[0] || n[name] > limits[1] {
				t.Errorf("%d times %s in three minutes, want %d to %d", n[name], name, limits[0], limits[1])
			}
		}
		if len(n) != 4 {
			t.Errorf("in three minutes %v, want heartbeats, renewals, and looks alone", n)
		}
		if took, err := r.end(); took > 0 || err != nil {
			t.Errorf("the run ended after %v: %v, want at once", took, err)
		}
		if got := last(f.sequence(), 201); got[0] != "leave" || slices.ContainsFunc(got[1:], func(name string) bool { return name != "release" }) {
			t.Errorf("the last statements are %v, want a leave and 200 releases", got)
		}
	})
}

// TestRunLosesWhatIsNotRenewed: a lease that is missing from the renewal's answer, or
// there at another epoch, is lost at once, and the others are not.
func TestRunLosesWhatIsNotRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 3, nil)
		time.Sleep(time.Second)
		f.set(func() {
			f.leases[1].expires = time.Time{}
			f.leases[2].epoch = 7 // A second process of our name has taken it.
		})
		time.Sleep(11 * time.Second)
		if ends := r.ends(0); len(ends) > 0 {
			t.Errorf("partition 0, which was renewed, has ended: %v", ends)
		}
		for p, epoch := range map[int]int64{1: 2, 2: 8} {
			ends, starts := r.ends(p), r.starts(p)
			if len(ends) != 1 || !errors.Is(ends[0].cause, ErrLost) || len(starts) != 2 || starts[1].epoch != epoch {
				t.Errorf("partition %d: started %v, ended %v, want one loss, then epoch %d", p, starts, ends, epoch)
			}
		}
		if n := f.count()["release"]; n > 0 {
			t.Errorf("%d releases of what was lost, want none: it may be a successor's", n)
		}
	})
}

// TestRunDeadlineOfAnAcquisition: a renewal whose list was made while an acquisition
// was under way moves the deadline of the others, not of what was acquired.
func TestRunDeadlineOfAnAcquisition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		f.leases[1] = &fakeLease{"dead", 1, time.Now().Add(6500 * time.Millisecond)}
		var sent, renewed time.Time
		f.before = func(name string, args []any) error {
			switch {
			case name == "acquire" && args[1] == int64(1) && sent.IsZero():
				sent = time.Now()
				time.Sleep(4 * time.Second)
			case name == "renew" && renewed.IsZero():
				renewed = time.Now()
			case name == "renew":
				return errors.New("no route")
			}
			return nil
		}
		r := f.begin(t, 2, nil)
		time.Sleep(time.Minute)
		first, second := r.ends(0), r.ends(1)
		if len(first) == 0 || len(second) == 0 {
			t.Fatalf("ended: %v and %v, want both", first, second)
		}
		if renewed.Before(sent) || renewed.After(sent.Add(4*time.Second)) {
			t.Fatalf("the renewal was sent at %v, the acquisition at %v: not what this test is about", renewed, sent)
		}
		if got, want := r.begun.Add(second[0].at), sent.Add(27*time.Second); !got.Equal(want) || first[0].at <= second[0].at {
			t.Errorf("partition 1 ended at %v, want %v; partition 0 at %v, want later", got, want, r.begun.Add(first[0].at))
		}
	})
}

// TestRunBlackHole: when nothing answers any more, fns end at their deadline, and
// the run can be ended although the driver is stuck.
func TestRunBlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 3, nil)
		time.Sleep(5 * time.Second)
		stuck := make(chan struct{})
		f.set(func() { f.before = func(string, []any) error { <-stuck; return nil } })
		time.Sleep(time.Minute)
		for p := range 3 {
			if ends := r.ends(p); len(ends) != 1 || ends[0].at > 27*time.Second || !errors.Is(ends[0].cause, ErrLost) {
				t.Errorf("partition %d ended: %v, want once, lost, before 27 s", p, ends)
			}
		}
		if took, err := r.end(); took > 5*time.Second || err == nil {
			t.Errorf("the run ended after %v: %v, want an error, after Timeout", took, err)
		}
		close(stuck)
	})
}

// TestRunEndIsBounded: whichever statements are stuck, and since when, the run ends Timeout
// after its last fn. What is not stuck is given up.
func TestRunEndIsBounded(t *testing.T) {
	for _, name := range []string{"leave", "release", ""} {
		for _, slow := range []time.Duration{0, 3 * time.Second, 12 * time.Second} {
			t.Run(fmt.Sprintf("%s stuck, fn returns after %v", cmp.Or(name, "all"), slow), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := newCluster(t)
					r := f.begin(t, 3, func(ctx context.Context, l Lease) error {
						<-ctx.Done()
						if l.Partition == 0 {
							time.Sleep(slow)
						}
						return nil
					})
					time.Sleep(time.Second)
					stuck := make(chan struct{})
					f.set(func() {
						f.before = func(statement string, _ []any) error {
							if name == "" || statement == name {
								<-stuck
							}
							return nil
						}
					})
					if took, err := r.end(); took > slow+5*time.Second || err == nil {
						t.Errorf("the run ended after %v: %v, want an error, Timeout after the last fn", took, err)
					}
					for p := range 3 {
						if l := f.lease(p); name == "leave" && !l.expires.IsZero() {
							t.Errorf("lease %d was not released", p)
						}
					}
					if _, stays := f.members["a"]; name == "release" && stays {
						t.Error("the member has not left")
					}
					close(stuck)
				})
			})
		}
	}
}

// TestRunOutlastsFailures: whichever statements fail for less than the deadline
// allows, no fn is interrupted.
func TestRunOutlastsFailures(t *testing.T) {
	for _, name := range []string{"heartbeat", "renew", "list", "owners", "acquire", "release", "leave", ""} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newCluster(t)
				for p := 1; p < 4; p++ {
					f.leases[p] = &fakeLease{"dead", 1, time.Now().Add(15 * time.Second)}
				}
				r := f.begin(t, 4, nil)
				time.Sleep(10 * time.Second)
				fail := func(statement string, _ []any) error {
					if statement == name || name == "" {
						return driver.ErrBadConn
					}
					return nil
				}
				f.set(func() { f.before = fail })
				time.Sleep(15 * time.Second)
				f.set(func() { f.before = nil })
				time.Sleep(time.Minute)
				for p := range 4 {
					if starts, ends := r.starts(p), r.ends(p); len(starts) != 1 || len(ends) > 0 {
						t.Errorf("partition %d: started %v, ended %v, want one start", p, starts, ends)
					}
				}
				f.set(func() { f.before = fail })
				time.AfterFunc(3*time.Second, func() { f.set(func() { f.before = nil }) })
				if took, err := r.end(); took > 5*time.Second || err != nil {
					t.Errorf("the run ended after %v: %v", took, err)
				}
				if len(f.members) > 0 || slices.ContainsFunc(slices.Collect(maps.Values(f.leases)), func(l *fakeLease) bool { return !l.expires.IsZero() }) {
					t.Errorf("left behind: members %v, leases %v", f.members, f.leases)
				}
			})
		})
	}
}

// TestRunHandOver: the lease is renewed until fn has returned, however long that
// takes, and released then; the log hears of it.
func TestRunHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 2, func(ctx context.Context, _ Lease) error {
			<-ctx.Done()
			time.Sleep(2 * time.Minute)
			return nil
		})
		time.Sleep(time.Second)
		f.joins("b")
		time.Sleep(time.Second)
		ends := r.ends(1)
		if len(ends) != 1 || errors.Is(ends[0].cause, ErrLost) || !strings.Contains(fmt.Sprint(ends[0].cause), "moves") || len(r.ends(0)) > 0 {
			t.Fatalf("ended: %v and %v, want the second, to be handed over", r.ends(0), ends)
		}
		for range 118 {
			if l := f.lease(1); !l.expires.After(time.Now()) || l.owner != "a" {
				t.Fatalf("the lease is %+v while fn goes on", l)
			}
			time.Sleep(time.Second)
		}
		if text := f.log(); strings.Count(text, "goes on") != 1 || !strings.Contains(text, "partition=1") {
			t.Errorf("the log has %q, want one line on partition 1", text)
		}
		time.Sleep(4 * time.Second)
		if l := f.lease(1); !l.expires.IsZero() {
			t.Errorf("the lease is %+v after fn has returned, want it released", l)
		}
		if starts := r.starts(1); len(starts) != 1 {
			t.Errorf("partition 1 was started %v, want once: it is the other's", starts)
		}
	})
}

// TestRunLooksInOrder: who owns what is read before who is there.
func TestRunLooksInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		f.begin(t, 2, nil)
		time.Sleep(time.Second)
		f.joins("b")
		time.Sleep(time.Second)
		if got := strings.Join(f.sequence(), " "); !strings.Contains(got, "list list owners list release list list") {
			t.Errorf("statements %s", got)
		}
	})
}

// TestRunWaitsForFnAfterALoss: an fn that ignores the loss keeps this node from
// starting the partition again, and no other.
func TestRunWaitsForFnAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		running := map[int]int{}
		var mu sync.Mutex
		r := f.begin(t, 2, func(ctx context.Context, lease Lease) error {
			mu.Lock()
			if running[lease.Partition]++; running[lease.Partition] > 1 {
				t.Errorf("partition %d runs twice", lease.Partition)
			}
			mu.Unlock()
			<-ctx.Done()
			if lease.Partition == 1 && lease.Epoch == 1 {
				time.Sleep(time.Minute)
			}
			mu.Lock()
			running[lease.Partition]--
			mu.Unlock()
			return nil
		})
		time.Sleep(5 * time.Second)
		f.set(func() { f.before = func(string, []any) error { return driver.ErrBadConn } })
		time.Sleep(30 * time.Second)
		f.set(func() { f.before = nil })
		time.Sleep(20 * time.Second)
		if starts := r.starts(0); len(starts) != 2 {
			t.Errorf("partition 0 was started %v, want again although the other's fn goes on", starts)
		}
		if starts := r.starts(1); len(starts) != 1 {
			t.Errorf("partition 1 was started %v, want once as long as fn goes on", starts)
		}
		time.Sleep(time.Minute)
		if starts := r.starts(1); len(starts) != 2 || starts[1].at-r.ends(1)[0].at < time.Minute || starts[1].at-r.ends(1)[0].at > 61*time.Second {
			t.Errorf("partition 1 was started %v, lost %v, want again just after fn returned", starts, r.ends(1))
		}
	})
}

// TestRunRestarts: an error starts fn again under the same lease, with back-off; nil
// ends the work and keeps the lease.
func TestRunRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		calls := 0
		r := f.begin(t, 1, func(context.Context, Lease) error {
			if calls++; calls < 6 {
				return errors.New("no fuel")
			}
			return nil
		})
		time.Sleep(time.Minute)
		starts := r.starts(0)
		if len(starts) != 6 || len(r.ends(0)) > 0 || starts[5].at < 1500*time.Millisecond || starts[5].at > 3200*time.Millisecond {
			t.Errorf("started %v, want six times within 1.5 to 3.2 s", starts)
		}
		for _, e := range starts {
			if e.epoch != 1 {
				t.Errorf("started at epoch %d, want 1", e.epoch)
			}
		}
		if n := strings.Count(f.log(), "no fuel"); n != 5 {
			t.Errorf("%d errors in the log, want 5", n)
		}
		if l := f.lease(0); l.owner != "a" || !l.expires.After(time.Now()) {
			t.Errorf("the lease is %+v after fn returned nil, want it kept", l)
		}
		if _, err := r.end(); err != nil || !f.lease(0).expires.IsZero() {
			t.Errorf("the run ended: %v, the lease is %+v, want it released", err, f.lease(0))
		}
	})
}

// TestRunPanics: a panic is passed on, with its stack, when all is given up.
func TestRunPanics(t *testing.T) {
	for name, fail := range map[string]func(){"out of fuel": func() { panic("out of fuel") }, "ended its goroutine": runtimeGoexit} {
		synctest.Test(t, func(t *testing.T) {
			f := newCluster(t)
			r := f.begin(t, 3, func(ctx context.Context, lease Lease) error {
				if lease.Partition == 1 {
					time.Sleep(time.Second)
					fail()
				}
				<-ctx.Done()
				time.Sleep(time.Second)
				return nil
			})
			<-r.finished
			text := fmt.Sprint(r.panicked)
			if !strings.Contains(text, name) || !strings.Contains(text, "run_test.go") {
				t.Errorf("RunPartitions panicked with %s, want %q and a stack", text, name)
			}
			if ends := r.ends(0); len(ends) != 1 || ends[0].at != time.Second || !strings.Contains(ends[0].cause.Error(), "panicked") {
				t.Errorf("partition 0 ended %v, want at once", ends)
			}
			if took := time.Since(r.begun); took != 2*time.Second {
				t.Errorf("RunPartitions panicked after %v, want when the other fns had returned", took)
			}
			for p, l := range f.leases {
				if !l.expires.IsZero() {
					t.Errorf("lease %d is %+v, want it released", p, l)
				}
			}
		})
	}
}

func runtimeGoexit() { runtime.Goexit() }

// TestRunClose: Close ends every fn at once and releases nothing.
func TestRunClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 2, nil)
		time.Sleep(5 * time.Second)
		f.c.Close()
		<-r.finished
		synctest.Wait()
		if ends := r.ends(1); len(ends) != 1 || ends[0].at != 5*time.Second || !errors.Is(ends[0].cause, ErrClosed) || !errors.Is(r.err, ErrClosed) {
			t.Errorf("RunPartitions = %v, fn ended %v, want ErrClosed at once", r.err, ends)
		}
		if n := f.count()["release"]; n > 0 {
			t.Errorf("%d releases after Close, want none", n)
		}
	})
}

// TestRunJoins: a connection that fails is tried again, a refusal is returned.
func TestRunJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		f.before = func(string, []any) error { return driver.ErrBadConn }
		r := f.begin(t, 1, nil)
		time.Sleep(time.Minute)
		f.set(func() { f.before = nil })
		time.Sleep(10 * time.Second)
		if len(r.starts(0)) != 1 {
			t.Errorf("started %v, err %v, want once when the database was back", r.starts(0), r.err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		f.before = func(string, []any) error { return &pq.Error{Code: "42501"} }
		r := f.begin(t, 1, nil)
		<-r.finished
		if err := new(pq.Error); !errors.As(r.err, &err) || time.Since(r.begun) > 0 {
			t.Errorf("RunPartitions that may not write = %v after %v, want the refusal at once", r.err, time.Since(r.begun))
		}
	})
}

// TestRunTwice: one run of a group for each node; groups of one member keep out of
// each other's way.
func TestRunTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 1, nil)
		time.Sleep(time.Second)
		work := func(ctx context.Context, _ Lease) error { <-ctx.Done(); return nil }
		cfg := PartitionConfig{Service: "web", Group: "jobs", Partitions: 1}
		if err := f.c.RunPartitions(t.Context(), cfg, work); !errors.Is(err, ErrHeld) {
			t.Errorf("a second run = %v, want ErrHeld", err)
		}
		cfg.Service = "other"
		if err := f.c.RunPartitions(t.Context(), cfg, work); !errors.Is(err, ErrHeld) {
			t.Errorf("a second run in another service = %v, want ErrHeld", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cfg.Service, cfg.Group = "web", "mails"
		second := make(chan error)
		go func() { second <- f.c.RunPartitions(ctx, cfg, work) }()
		time.Sleep(time.Minute)
		if got := f.member("a").groups; got != `["jobs","mails"]` {
			t.Errorf("the member's groups are %s, want both", got)
		}
		cancel()
		if err := <-second; err != nil || f.member("a").groups != `["jobs"]` {
			t.Errorf("the second run ended: %v, the member's groups are %q, want the first alone", err, f.member("a").groups)
		}
		if _, err := r.end(); err != nil || len(f.members) > 0 {
			t.Errorf("the first run ended: %v, members %v, want none", err, f.members)
		}
	})
}

// TestRunMemberGone: a node that is no member any more has not lost its leases. It
// joins again before it acts.
func TestRunMemberGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		r := f.begin(t, 2, nil)
		time.Sleep(time.Second)
		f.set(func() { delete(f.members, "a") })
		time.Sleep(time.Second)
		if ends := append(r.ends(0), r.ends(1)...); len(ends) > 0 || f.member("a").groups == "" {
			t.Errorf("ended %v, the member is %+v, want it back and no end", ends, f.member("a"))
		}
	})
}

// TestRunAgain: a process that starts again under its name has its partitions back at
// once, at new epochs.
func TestRunAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newCluster(t)
		f.leases[0] = &fakeLease{"a", 4, time.Now().Add(20 * time.Second)}
		f.leases[1] = &fakeLease{"a", 6, time.Now().Add(20 * time.Second)}
		f.joins("b")
		r := f.begin(t, 2, nil)
		time.Sleep(time.Second)
		if starts := r.starts(0); len(starts) != 1 || starts[0].epoch != 5 || starts[0].at > 0 {
			t.Errorf("partition 0 was started %v, want at once, at epoch 5", starts)
		}
		if len(r.starts(1)) > 0 || !f.lease(1).expires.IsZero() {
			t.Errorf("partition 1 was started %v, its lease is %+v, want it released for the other node", r.starts(1), f.lease(1))
		}
	})
}
