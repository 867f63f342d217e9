package coord

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// runner is one run. Its loop decides: one goroutine that looks, takes and
// releases. Beside it there are the keeper's, for renewals, and one for each fn.
type runner struct {
	c      *Coord
	cfg    PartitionConfig
	member membership
	fn     func(context.Context, Lease) error
	ctx    context.Context // the parent of every fn's
	end    context.CancelCauseFunc
	nudge  chan struct{} // holds one: an fn is over

	renewals *batch[*work] // of all leases, by one statement

	mu       sync.Mutex
	works    map[int]*work // by partition; those whose lease is lost too, until fn has returned
	done     map[int]bool  // by partition: fn has returned nil
	panicked string        // what fn panicked with first, and its stack

	// The loop's own:
	members  []string          // as seen last
	joined   bool              // a heartbeat came through
	asked    bool              // a heartbeat was sent
	left     bool              // the member is gone
	beat     time.Time         // when the next heartbeat is due
	read     time.Time         // when Owners was read last
	changed  time.Time         // when the members, or what is held, last changed
	short    bool              // of the share: free partitions are looked for
	free     map[int]time.Time // since when a partition has been seen free
	failures int               // since the last look that came through
}

// work is a partition that was acquired, until its fn is over and it is released.
type work struct {
	lease    Lease
	ctx      context.Context // fn's
	end      context.CancelCauseFunc
	keeper   *keeper
	untie    func() bool // keeps the end of keeper from ending ctx
	over     chan struct{}
	stranded bool // it was dealt to a node that did not take it

	asked time.Time // when its context had ended at a look for the first time; the loop's
	told  bool      // the log knows that fn goes on
}

func (w *work) isOver() bool {
	select {
	case <-w.over:
		return true
	default:
		return false
	}
}

// renew renews leases by one statement. A lease whose epoch has changed is another process's
// under our name, and lost.
func (r *runner) renew(ctx context.Context, patience time.Duration, works []*work, answer answer) error {
	partitions := make([]int, len(works))
	for i, w := range works {
		partitions[i] = w.lease.Partition
	}
	err := r.c.leases.renewFree(ctx, patience, r.cfg.Group, partitions, r.cfg.Node, r.cfg.TTL, func(sent time.Time, leases []Lease, locked []int) {
		epochs := make(map[int]int64, len(leases))
		for _, lease := range leases {
			epochs[lease.Partition] = lease.Epoch
		}
		fates := make([]fate, len(works))
		for i, w := range works {
			switch {
			case epochs[w.lease.Partition] == w.lease.Epoch:
				fates[i] = renewed
			case slices.Contains(locked, w.lease.Partition):
				fates[i] = busy
			}
		}
		answer(renewal{sent, fates})
	})
	switch {
	case errors.Is(err, ErrClosed):
		r.end(ErrClosed)
		return context.Canceled // It is no loss, to the keepers either.
	case err != nil:
		r.warn("renewal failed", "error", err)
	}
	return err
}

// list returns the works that are so, by partition.
func (r *runner) list(so func(*work) bool) []*work {
	r.mu.Lock()
	defer r.mu.Unlock()
	works := make([]*work, 0, len(r.works))
	for _, w := range r.works {
		if so(w) {
			works = append(works, w)
		}
	}
	slices.SortFunc(works, func(a, b *work) int { return a.lease.Partition - b.lease.Partition })
	return works
}

// loop runs until ctx ends, for which it returns nil but after Close, or a failure
// that will not pass.
func (r *runner) loop() error {
	for {
		var err error
		if r.ctx.Err() == nil { // Else quit knows the order of things.
			err = r.step()
		}
		switch {
		case errors.Is(context.Cause(r.ctx), ErrClosed) || errors.Is(err, ErrClosed):
			return ErrClosed
		case r.ctx.Err() != nil:
			return nil
		case err != nil && r.final(err):
			return err
		case err != nil:
			r.failures++
			r.warn("out of step, will try again", "error", err)
		default:
			r.failures = 0
		}
		r.complain()
		select {
		case <-r.ctx.Done():
		case <-r.nudge:
		case <-time.After(r.pause()):
		}
	}
}

// final tells whether an error will not pass. Until the node has joined, it is any
// that is not the connection's: one that may do nothing here should say so.
func (r *runner) final(err error) bool {
	if errors.Is(err, ErrFormat) || errors.Is(err, ErrInvalid) || errors.Is(err, errors.ErrUnsupported) {
		return true
	}
	unreached := errors.As(err, new(unsure)) || errors.Is(err, errAbandoned) || r.c.classify(err) != FailureOther
	return !r.joined && !unreached
}

// step does what is due.
func (r *runner) step() error {
	if !time.Now().Before(r.beat) { // First: what follows may wait for others' transactions.
		if err := r.heartbeat(); err != nil {
			return err
		}
	}
	if err := r.settle(r.ctx); err != nil {
		return err
	}
	return r.look()
}

// settle releases the leases whose fn is over, unless they are lost.
func (r *runner) settle(ctx context.Context) error {
	lost := 0
	defer func() {
		if lost > 0 {
			r.warn("leases were lost", "leases", lost)
		}
	}()
	for _, w := range r.list((*work).isOver) {
		w.untie()
		if w.keeper.stop() != nil {
			lost++
			r.short, r.changed = true, time.Now() // It may be had back.
		} else if _, err := r.c.leases.giveUp(ctx, r.cfg.Group, w.lease.Partition, r.cfg.Node, w.lease.Epoch); err != nil { // By epoch: not what a successor of our name has by now.
			return err
		}
		r.mu.Lock()
		delete(r.works, w.lease.Partition)
		r.mu.Unlock()
	}
	return nil
}

// heartbeat keeps the membership up, for all groups that this process runs under it.
func (r *runner) heartbeat() error {
	err := r.c.roll.write(r.ctx, r.member, func(groups []string) error { return r.beatFor(r.ctx, groups) })
	if err == nil {
		r.joined, r.beat = true, time.Now().Add(jitter(r.cfg.Heartbeat, 10))
	}
	return err
}

func (r *runner) beatFor(ctx context.Context, groups []string) error {
	r.asked = true
	ctx, cancel := context.WithTimeout(ctx, r.cfg.TTL-r.cfg.Heartbeat) // Then the membership expires.
	defer cancel()
	on := r.c.renewing(r.cfg.TTL)
	on.waits = true
	_, err := r.c.members.beat(ctx, on, r.cfg.Service, r.cfg.Node, r.cfg.Address, r.cfg.TTL, groups)
	return err
}

// leave ends the membership, or this group's part of it.
func (r *runner) leave(ctx context.Context) error {
	if r.left || !r.asked {
		return nil
	}
	r.c.roll.giveUp(r.member, r.cfg.Group)
	_, err := await(ctx, r.c, func() (struct{}, error) { // A heartbeat in flight would outlast ctx.
		return struct{}{}, r.c.roll.write(ctx, r.member, func(groups []string) error {
			if len(groups) > 0 {
				return r.beatFor(ctx, groups)
			}
			return r.c.members.Leave(ctx, r.cfg.Service, r.cfg.Node)
		})
	}, nil)
	r.left = err == nil
	return err
}

// errNoMember: the membership has expired while the database was out of reach, or was
// ended by somebody else. Who acted now would give up what is dealt to others.
var errNoMember = errors.New("the membership has expired")

// look reads the members, a cheap statement, and only if they have changed, or this
// node is short of its share, who owns what.
func (r *runner) look() error {
	if !r.short && time.Since(r.read) < r.cfg.TTL {
		members, err := r.nodes()
		if err != nil || slices.Equal(members, r.members) {
			return err
		}
	}
	// In this order: who sees a partition that was freed because a node has joined
	// or left must see that too, or would take it in the joiner's place.
	owners, err := r.c.leases.Owners(r.ctx, r.cfg.Group)
	if err != nil {
		return err
	}
	members, err := r.nodes()
	if err != nil {
		return err
	}
	r.read = time.Now()
	if !slices.Equal(members, r.members) {
		r.members, r.changed = members, time.Now()
	}
	if !slices.Contains(members, r.cfg.Node) {
		r.beat, r.short = time.Time{}, true
		return errNoMember
	}
	return r.act(owners)
}

// nodes is the nodes that run the group, in order.
func (r *runner) nodes() (nodes []string, err error) {
	members, err := r.c.members.List(r.ctx, r.cfg.Service)
	for _, m := range members {
		if slices.Contains(m.Groups, r.cfg.Group) {
			nodes = append(nodes, m.Node)
		}
	}
	return nodes, err
}

// act hands over what is more than this node's share, and takes what is dealt to it.
func (r *runner) act(leases []Lease) error {
	owners := make([]string, r.cfg.Partitions)
	for _, l := range leases {
		if l.Partition < len(owners) {
			owners[l.Partition] = l.Owner
		}
	}
	quota, dealt := share(owners, r.members, r.cfg.Node)
	working := r.list(func(w *work) bool { return w.ctx.Err() == nil })
	slices.SortStableFunc(working, func(a, b *work) int { // What the others leave is kept.
		switch {
		case a.stranded == b.stranded:
			return 0
		case a.stranded:
			return -1
		}
		return 1
	})
	for _, w := range working[min(quota, len(working)):] {
		w.end(errHandOver)
	}
	want := append(r.unclaimed(owners), dealt...) // What is ours already counts as held: dealt comes on top.
	stranded := r.stranded(owners, dealt)
	taken, err := r.take(want[:min(max(quota-len(working), 0), len(want))], false)
	r.short = len(working)+taken < quota
	if err != nil || r.short {
		return err
	}
	if _, err := r.take(stranded, true); err != nil {
		return err
	}
	return r.disclaim(owners)
}

// stranded returns partitions assigned to another node that have stayed free for a TTL. That
// node can't take them, for example since its fn goes on although its lease was lost. A node
// that sees them takes them, and hands over others.
func (r *runner) stranded(owners []string, dealt []int) (partitions []int) {
	now := time.Now()
	for p, owner := range owners {
		since, seen := r.free[p]
		switch {
		case owner != "" || slices.Contains(dealt, p):
			delete(r.free, p)
		case !seen:
			r.free[p] = now
		case now.Sub(since) > r.cfg.TTL:
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// unclaimed is what this node owns and has no fn for: a former process of its name
// had it, or the reply to its acquisition was lost.
func (r *runner) unclaimed(owners []string) (partitions []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p, owner := range owners {
		if owner == r.cfg.Node && r.works[p] == nil {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// disclaim releases what is unclaimed and beyond this node's share.
func (r *runner) disclaim(owners []string) error {
	for _, p := range r.unclaimed(owners) {
		if r.ctx.Err() != nil {
			return nil // The end of the run comes first.
		}
		if _, err := r.c.leases.Release(r.ctx, r.cfg.Group, p, r.cfg.Node); err != nil {
			return err
		}
	}
	return nil
}

// take acquires partitions and starts fn for them. It leaves off where something
// else needs the loop, or the view that it acts on grows old.
func (r *runner) take(partitions []int, stranded bool) (taken int, err error) {
	began := time.Now()
	for _, p := range partitions {
		if r.ctx.Err() != nil || len(r.nudge) > 0 || time.Since(began) > lookMin {
			break
		}
		if r.running(p) { // Still, although the lease was lost.
			continue
		}
		// It does not wait for an open guard: renewals, and other partitions, would wait too.
		lease, err := r.c.leases.take(r.ctx, r.cfg.Group, p, r.cfg.Node, r.cfg.TTL, true)
		switch {
		case errors.Is(err, ErrHeld): // Another was faster, or has it in an open transaction.
		case err != nil:
			return taken, err
		case time.Until(lease.Deadline) > r.cfg.margin(): // Else it is unclaimed.
			r.start(lease, stranded)
			taken++
		}
	}
	if taken > 0 {
		r.changed = time.Now()
	}
	return taken, nil
}

func (r *runner) running(partition int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.works[partition] != nil
}

// start starts fn under a lease.
func (r *runner) start(lease Lease, stranded bool) {
	w := &work{lease: lease, over: make(chan struct{}), stranded: stranded}
	w.ctx, w.end = context.WithCancelCause(r.ctx)
	w.keeper = r.renewals.keep(w, newHold(), lease.Deadline, pace{r.cfg.Heartbeat, r.cfg.TTL, r.cfg.margin()})
	w.untie = context.AfterFunc(w.keeper.ctx, func() { w.end(ErrLost) })
	r.mu.Lock()
	r.works[lease.Partition] = w
	r.mu.Unlock()
	go r.work(w)
}

// work calls fn until there is nothing more to do for it, and then waits for the
// end of its context.
func (r *runner) work(w *work) {
	defer func() {
		close(w.over)
		select {
		case r.nudge <- struct{}{}:
		default:
		}
	}()
	for attempts := 1; w.ctx.Err() == nil; attempts++ {
		began := time.Now()
		err := r.call(w)
		if err == nil {
			<-w.ctx.Done()
			return
		}
		if w.ctx.Err() != nil {
			return
		}
		if time.Since(began) > restartMax {
			attempts = 1
		}
		r.warn("the work failed, will be started again", "partition", w.lease.Partition, "error", err)
		select {
		case <-w.ctx.Done():
		case <-time.After(backoff(attempts, restartMin, restartMax)):
		}
	}
}

// call calls fn once, if it has not done its work. If it panics, or ends its
// goroutine, that ends the run.
func (r *runner) call(w *work) (err error) {
	r.mu.Lock()
	done := r.done[w.lease.Partition]
	r.mu.Unlock()
	if done {
		return nil
	}
	returned := false
	defer func() {
		if returned {
			return
		}
		value := recover()
		if value == nil {
			value = "fn ended its goroutine"
		}
		r.mu.Lock()
		if r.panicked == "" {
			r.panicked = fmt.Sprintf("%v\n\n%s", value, debug.Stack())
		}
		r.mu.Unlock()
		r.end(errPanicked)
	}()
	err = r.fn(w.ctx, w.lease)
	returned = true
	if err == nil && w.ctx.Err() == nil {
		r.mu.Lock()
		r.done[w.lease.Partition] = true
		r.mu.Unlock()
	}
	return err
}

const (
	restartMin = 100 * time.Millisecond // before a failed fn is called again
	restartMax = 30 * time.Second

	lookMin   = 100 * time.Millisecond   // between looks at the members, at least
	lookShare = 12500 * time.Microsecond // for each of them, so that all nodes together look 80 times a second
)

// pause is how long to wait for the next step. A node that is short looks often while
// things change, and ever less as they don't.
func (r *runner) pause() time.Duration {
	look := min(max(lookMin, time.Duration(len(r.members))*lookShare), r.cfg.Heartbeat)
	switch {
	case r.failures > 0:
		return backoff(r.failures, look/2, r.cfg.Heartbeat)
	case r.short:
		look = min(max(look/4, time.Since(r.changed)/4), r.cfg.Heartbeat)
	}
	return min(jitter(look, 4), max(time.Until(r.beat), 0))
}

// jitter takes up to one part of so many off.
func jitter(d time.Duration, parts int64) time.Duration {
	return d - rand.N(d/time.Duration(parts)+1)
}

// complain tells the log which fn has gone on for a heartbeat after its context
// ended.
func (r *runner) complain() {
	for _, w := range r.list(func(w *work) bool { return w.ctx.Err() != nil && !w.isOver() }) {
		switch {
		case w.asked.IsZero():
			w.asked = time.Now()
		case !w.told && time.Since(w.asked) >= r.cfg.Heartbeat:
			w.told = true
			r.warn("the work goes on although its context has ended", "partition", w.lease.Partition, "cause", context.Cause(w.ctx))
		}
	}
}

func (r *runner) warn(message string, args ...any) {
	r.c.cfg.Logger.Warn("coord: "+message, append([]any{"group", r.cfg.Group, "node", r.cfg.Node}, args...)...)
}

// quit gives everything up: the membership first, so that others see it coming, then
// each lease as its fn returns. It waits for every fn, and repeats what fails until ctx ends.
func (r *runner) quit(ctx context.Context) error {
	for attempts := 1; ; {
		err := r.giveUp(ctx)
		left := r.list(func(*work) bool { return true })
		switch {
		case slices.ContainsFunc(left, func(w *work) bool { return !w.isOver() }):
			r.complain()
			select {
			case <-r.nudge:
			case <-time.After(r.cfg.Heartbeat / 4):
			}
		case err == nil && len(left) == 0:
			return nil
		case err == nil: // The last one returned meanwhile.
		case errors.Is(err, ErrClosed), r.final(err), after(ctx, backoff(attempts, 10*time.Millisecond, time.Second)) != nil:
			for _, w := range left {
				_ = w.keeper.stop()
			}
			return err
		default:
			attempts++
		}
	}
}

// giveUp leaves and settles once. A membership that is stuck holds up no lease.
func (r *runner) giveUp(ctx context.Context) error {
	var left outcome[struct{}]
	done := make(chan struct{})
	go func() {
		defer close(done)
		protect(func() (struct{}, error) { return struct{}{}, r.leave(ctx) }, &left)
	}()
	select {
	case <-done:
	case <-time.After(r.c.cfg.Timeout / 8):
	}
	settled := r.settle(ctx)
	<-done
	rethrow(left.err)
	return cmp.Or(left.err, settled)
}
