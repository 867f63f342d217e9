package coord

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// PartitionConfig configures [Coord.RunPartitions].
type PartitionConfig struct {
	// Service is what the node is a member of while it runs.
	Service string
	// Node names this process in Service and owns its leases; "" is [Coord.Owner].
	// No other process that runs may have the same: it would take the leases over.
	Node string
	// Address is kept with the member, for others to read; it may be empty.
	Address string
	// Group is whose partitions are shared out, over those members of Service that
	// run it.
	Group string
	// Partitions is how many there are, 1 or more: 0 to Partitions-1. It must be the
	// same in every node.
	Partitions int
	// TTL is how long leases and membership outlive a node that has crashed; default
	// 15 s. It must be the same in every node, and should be three times
	// [Config.Timeout] or more, so that a statement that is stuck loses nothing.
	TTL time.Duration
	// Heartbeat is the time between renewals, at most TTL/2; default TTL/3.
	Heartbeat time.Duration
}

// complete validates cfg and fills in the defaults.
func (cfg *PartitionConfig) complete(c *Coord) error {
	cfg.Node = cmp.Or(cfg.Node, c.Owner())
	cfg.TTL = cmp.Or(cfg.TTL, 15*time.Second)
	cfg.Heartbeat = cmp.Or(cfg.Heartbeat, cfg.TTL/3)
	if err := cmp.Or(checkText("service", cfg.Service), checkText("node", cfg.Node), checkOptional("address", cfg.Address),
		checkText("group", cfg.Group), checkTTL(cfg.TTL)); err != nil {
		return err
	}
	switch {
	case cfg.Partitions < 1:
		return invalid("%d partitions", cfg.Partitions)
	case cfg.Heartbeat <= 0 || cfg.Heartbeat > cfg.TTL/2:
		return invalid("Heartbeat %s is not between 0 and half of TTL %s", cfg.Heartbeat, cfg.TTL)
	}
	return nil
}

// margin is how long before its deadline a lease that can't be renewed is lost, as
// a [Mutex] has it.
func (cfg *PartitionConfig) margin() time.Duration { return cfg.TTL / 10 }

// Causes of the end of an fn's context, beside [ErrLost], [ErrClosed] and the
// caller's own.
var (
	errHandOver = errors.New("coord: the partition moves to another node")
	errPanicked = errors.New("coord: the work on another partition, or the database driver, has panicked")
)

// RunPartitions joins the service and works on this node's share of the group's
// partitions until ctx ends: it calls fn, on a goroutine of its own, for each
// partition that becomes this node's. The shares of the live nodes differ by at most
// one, and a node that joins or leaves moves no more partitions than that takes. See
// [Coord.RunLeader] for one partition.
//
// fn works until its context ends, and then returns soon. The context is a child of
// ctx. Its cause is [ErrLost] when the lease is lost, [ErrClosed] after
// [Coord.Close], ctx's own when that ends, and another error, for people to read, when
// the partition moves or the work on another has panicked. When it moves, the lease is
// kept until fn has returned, and the next owner starts at once. So an
// fn that ignores its context delays the move, and [Config.Logger] hears of it. One
// that ignores a loss may run beside the next owner's. No context ends in time in a
// process that is suspended: use [LeaseStore.Guard] with fn's lease for what it
// writes, or check the lease's epoch where it is written. The lease's Deadline is
// that of the acquisition; renewals go on without fn.
//
// fn that returns nil has done its work: the partition stays this node's, and this run
// does not call fn for it again, even if it moves away and comes back. If fn returns an error before
// its context ends, that is logged, and fn is called again under the same lease after 0.1 s, longer each time, to half a
// minute. If it panics, or ends its goroutine, everything is given up as at the end of
// ctx, and RunPartitions panics with a string of the value and fn's stack.
//
// When ctx ends, RunPartitions returns nil once every fn has returned, every lease is
// released and the member has left, or the errors of what could not be within
// [Config.Timeout] after the last fn: that is left to the TTL. Nodes that crash are replaced within TTL and a Heartbeat. Failures of
// the database are logged and outlasted; none ends an fn but by its deadline. Only one
// that will not pass is returned, such as [ErrFormat], or any failure to join that is
// not one of the connection.
//
// RunPartitions returns [ErrInvalid] for a bad configuration, [ErrHeld] if this Coord
// runs the group for the node already, the context's error if ctx has ended before, and
// [ErrClosed] after [Coord.Close], once every fn has returned. Close does not wait for
// that, and releases nothing: end ctx first.
func (c *Coord) RunPartitions(ctx context.Context, cfg PartitionConfig,
	fn func(ctx context.Context, lease Lease) error) error {
	err := cfg.complete(c)
	switch {
	case err != nil:
	case fn == nil:
		err = invalid("fn is nil")
	case ctx.Err() != nil:
		err = ended(ctx)
	default:
		err = c.run(ctx, cfg, fn)
	}
	return wrap("run partitions", err)
}

// RunLeader works as leader among all who call it with the same name: one of them at
// a time, which fn is called for. It is [Coord.RunPartitions] with one partition, and
// name for service and group, so name must be no other group's; ttl 0 is 15 s. A
// leader whose fn returns nil stays leader, and nobody works meanwhile: to resign, end
// ctx.
func (c *Coord) RunLeader(ctx context.Context, name string, ttl time.Duration,
	fn func(ctx context.Context, lease Lease) error) error {
	return c.RunPartitions(ctx, PartitionConfig{Service: name, Group: name, Partitions: 1, TTL: ttl}, fn)
}

// run enlists a runner, runs it, and passes a panic of fn on.
func (c *Coord) run(ctx context.Context, cfg PartitionConfig, fn func(context.Context, Lease) error) error {
	if c.over() != nil {
		return ErrClosed
	}
	m := membership{cfg.Service, cfg.Node}
	if err := c.roll.enter(m, cfg.Group); err != nil {
		return err
	}
	defer c.roll.strike(m, cfg.Group)
	r := &runner{c: c, cfg: cfg, member: m, fn: fn, works: map[int]*work{}, done: map[int]bool{}, free: map[int]time.Time{}, nudge: make(chan struct{}, 1), short: true, changed: time.Now()}
	r.ctx, r.end = context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.ctx, func() { r.end(ErrClosed) }) // At once, whatever the loop waits for.
	r.renewals = newBatch(c.cfg.Timeout, r.renew)
	r.renewals.all = true
	returned := false
	defer func() {
		if returned {
			return
		}
		r.end(errPanicked) // By the driver, in the loop or in quit: nothing may go on.
		for _, w := range r.list(func(*work) bool { return true }) {
			<-w.over
			w.untie()
			_ = w.keeper.stop()
		}
		stop()
	}()
	leaving, cancel := context.WithCancelCause(release(ctx))
	defer cancel(nil)
	go func() { // Whatever is stuck, the run ends Timeout after its last fn.
		<-r.ctx.Done()
		for _, w := range r.list(func(*work) bool { return true }) {
			<-w.over
		}
		_ = after(leaving, c.cfg.Timeout)
		cancel(errAbandoned)
	}()
	err := r.loop()
	r.end(err) // Of every fn, if a failure ended the loop.
	left := r.quit(leaving)
	returned = true
	stop()
	switch {
	case r.panicked != "":
		panic(r.panicked)
	case err == nil:
		return left
	case left == nil, errors.Is(err, ErrClosed), !r.joined: // Or it failed to leave for the same reason.
		return err
	}
	return fmt.Errorf("%w; %w", part(err), part(left))
}

// roll is which groups this process runs, under which memberships. A member may run
// several, and has one row for all of them.
type roll struct {
	mu   sync.Mutex
	runs map[membership]*entry
}

type membership struct{ service, node string }

// entry is what a roll knows of one membership.
type entry struct {
	groups  map[string]bool // false while it is being given up; under the roll's mu
	writing chan struct{}   // holds one while the row is written, so that no older list of groups comes last
}

// enter enters a run.
func (l *roll) enter(m membership, group string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for other, e := range l.runs { // Of whatever service: leases go by group and node.
		if _, runs := e.groups[group]; runs && other.node == m.node {
			return &HeldError{What: "run of group " + group, Owner: m.node}
		}
	}
	if l.runs == nil {
		l.runs = map[membership]*entry{}
	}
	if l.runs[m] == nil {
		l.runs[m] = &entry{map[string]bool{}, make(chan struct{}, 1)}
	}
	l.runs[m].groups[group] = true
	return nil
}

// strike takes out a run that has ended.
func (l *roll) strike(m membership, group string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if delete(l.runs[m].groups, group); len(l.runs[m].groups) == 0 {
		delete(l.runs, m)
	}
}

// giveUp takes a group out of what is written.
func (l *roll) giveUp(m membership, group string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runs[m].groups[group] = false
}

// write calls do, which writes the row of a member, with the groups that are not being given
// up. It waits for other runs of the member that write the row, until ctx ends.
func (l *roll) write(ctx context.Context, m membership, do func(groups []string) error) error {
	l.mu.Lock()
	e := l.runs[m]
	l.mu.Unlock()
	select {
	case e.writing <- struct{}{}:
	case <-ctx.Done():
		return ended(ctx)
	}
	defer func() { <-e.writing }()
	var groups []string
	l.mu.Lock()
	for group, stays := range e.groups {
		if stays {
			groups = append(groups, group)
		}
	}
	l.mu.Unlock()
	return do(groups)
}

// share is node's part of the partitions that have these owners, "" for those that
// are free: how many it may have, and which of the free ones it is to take. Every
// node that sees the same finds the same, so that no two take one.
//
// Where the partitions do not divide, those who have more than the least share may
// keep one more, by name, then others by name. That depends on nothing that changes
// while partitions move, or some would move back. A partition of one who is no member
// is neither free nor counted.
func share(owners, members []string, node string) (quota int, dealt []int) {
	held := make(map[string]int, len(members))
	var free []int
	for p, owner := range owners {
		held[owner]++
		if owner == "" {
			free = append(free, p)
		}
	}
	least, more := len(owners)/len(members), len(owners)%len(members)
	has := func(m string) bool { return held[m] > least }
	rank := append(filter(members, has), filter(members, func(m string) bool { return !has(m) })...)
	quotas := make(map[string]int, len(members))
	for i, m := range rank {
		quotas[m] = least
		if i < more {
			quotas[m]++
		}
	}
	for _, m := range members {
		n := min(max(quotas[m]-held[m], 0), len(free))
		if m == node {
			dealt = free[:n]
		}
		free = free[n:]
	}
	return quotas[node], dealt
}

func filter(list []string, keep func(string) bool) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return !keep(s) })
}
