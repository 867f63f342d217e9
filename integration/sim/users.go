package sim

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/seed-4c80c132/coord"
)

// user is a part of a process that uses coord as programs do.
type user struct {
	*process
	rng  *rand.Rand
	id   string // of this user of this process
	kind int
	n    int
}

var userKinds = []struct {
	name string
	step func(*user)
}{
	{"mutex", (*user).lockMutex},
	{"mutex", (*user).lockMutex},
	{"ids", (*user).lockIDs},
	{"ids", (*user).lockIDs},
	{"lease", (*user).takeLease},
	{"reservation", (*user).reserve},
	{"run", (*user).runGroup},
	{"read", (*user).read},
}

func newUser(p *process, u userPlan, i, starts int) *user {
	return &user{process: p, rng: rand.New(rand.NewPCG(u.seed, uint64(starts))), id: fmt.Sprintf("n%d.%d:%s%d", p.node, starts, userKinds[u.kind].name, i), kind: u.kind}
}

// live does one thing after another.
func (u *user) live() {
	for u.pause(2 * time.Second) {
		u.n++
		userKinds[u.kind].step(u)
	}
}

// pause waits, and reports whether the process goes on.
func (u *user) pause(most time.Duration) bool {
	select {
	case <-u.life.Done():
		return false
	case <-time.After(within(u.rng, time.Millisecond, most)):
		return true
	}
}

// work is pause for the holder of something, who leaves early when ctx ends.
func (u *user) work(ctx context.Context, most time.Duration) {
	select {
	case <-ctx.Done():
	case <-u.life.Done():
	case <-time.After(within(u.rng, time.Millisecond, most)):
	}
}

func (u *user) chance(n int) bool { return u.rng.IntN(n) == 0 }

// context returns a context as callers have them: with deadlines short and long, cancelled at any moment, or over before.
func (u *user) context() (context.Context, context.CancelFunc) {
	most := []time.Duration{20 * time.Millisecond, time.Second, 10 * time.Second, time.Minute}[u.rng.IntN(4)]
	if u.w.hasty {
		most = 100 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(u.life, within(u.rng, 0, most))
	if u.chance(3) {
		ctx, cancelled := context.WithCancel(ctx)
		timer := time.AfterFunc(within(u.rng, 0, 2*time.Second), cancelled)
		return ctx, func() { timer.Stop(); cancelled(); cancel() }
	}
	return ctx, cancel
}

// releasing returns the context of a release, which may have ended.
func (u *user) releasing() context.Context {
	if u.chance(2) {
		return context.Background()
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// check looks at the form of an error.
func (u *user) check(what string, err error) {
	if err != nil && strings.Count(err.Error(), "coord:") != strings.Count(err.Error(), "\n")+1 && !u.crashed { // Joined errors have a line each.
		u.w.fail("%s: %s: not one coord: in %q", u.id, what, err)
	}
}

// answered notes whether an acquisition was granted or refused. With short deadlines few are, but not none.
func (u *user) answered(err error) {
	switch {
	case err == nil, errors.Is(err, coord.ErrHeld):
		u.failed = 0
	case u.w.hasty && u.w.calm(lightly, u.w.ttl) && !u.closed:
		if u.failed++; u.failed%100 == 0 {
			u.w.fail("%s: a hundred acquisitions, one after the other, got no answer, such as %v", u.id, err)
		}
	}
}

func (u *user) lockMutex() {
	ctx, cancel := u.context()
	defer cancel()
	name := fmt.Sprint("m", u.rng.IntN(u.w.names))
	switch u.rng.IntN(4) {
	case 0:
		u.tryLock(ctx, name)
	case 1:
		u.doLocked(ctx, name)
	default:
		defer u.w.wait("mutex/"+name, ctx)()
		done := u.expectAfter(ctx, "Lock "+name, 0)
		before := u.w.tokens["mutex/"+name]
		lock, err := u.mutex.Lock(ctx, name)
		done()
		u.locked(name, lock, err, before)
	}
}

func (u *user) tryLock(ctx context.Context, name string) {
	done := u.expectAfter(ctx, "TryLock "+name, 0)
	before := u.w.tokens["mutex/"+name]
	lock, err := u.mutex.TryLock(ctx, name)
	done()
	u.locked(name, lock, err, before)
}

// locked holds a mutex for a while and unlocks it.
func (u *user) locked(name string, lock *coord.Lock, err error, before int64) {
	u.check("lock", err)
	u.answered(err)
	if err != nil {
		return
	}
	ctx, cancel := lock.Context(u.life)
	defer cancel()
	h := u.w.grant("mutex/"+name, u, lock.Fence(), before)
	stop := context.AfterFunc(lockContext(lock), func() { u.w.lost(h) })
	u.useMutex(ctx, name, lock)
	if u.crashed {
		<-lock.Done()
		return
	}
	stop()
	h.end()
	done := u.expect("Unlock "+name, u.w.timeout)
	err = lock.Unlock(u.releasing())
	done()
	u.check("unlock", err)
	select {
	case <-lock.Done():
	default:
		u.w.fail("%s: Done of %s is open after Unlock", u.id, name)
	}
}

func lockContext(lock *coord.Lock) context.Context {
	ctx, _ := lock.Context(context.Background()) // Ends with the lock.
	return ctx
}

func (u *user) useMutex(ctx context.Context, name string, lock *coord.Lock) {
	for range 1 + u.rng.IntN(2) {
		if u.chance(2) {
			u.guarded(ctx, "mutex/"+name, lock.Fence(), func(ctx context.Context, tx *sql.Tx) error { return lock.Guard(ctx, tx) })
		}
		u.work(ctx, []time.Duration{100 * time.Millisecond, 2 * time.Second, 2 * u.w.ttl}[u.rng.IntN(3)])
	}
}

func (u *user) doLocked(ctx context.Context, name string) {
	before, wasLost, called := u.w.tokens["mutex/"+name], false, false
	wait := u.w.wait("mutex/"+name, ctx)
	err := u.mutex.Do(ctx, name, func(ctx context.Context, lock *coord.Lock) error {
		called = true
		wait()
		h := u.w.grant("mutex/"+name, u, lock.Fence(), before)
		stop := context.AfterFunc(lockContext(lock), func() { wasLost = true; u.w.lost(h) })
		u.useMutex(ctx, name, lock)
		if u.crashed {
			<-lock.Done()
		}
		stop()
		h.end()
		return nil
	})
	wait()
	u.check("do", err)
	if called && wasLost && !errors.Is(err, coord.ErrLost) {
		u.w.fail("%s: Do lost %s and returned %v", u.id, name, err)
	}
}

// guarded writes in a transaction that a guard keeps safe: it commits, rolls back, or is forgotten for a while.
func (u *user) guarded(working context.Context, name string, token int64, guard func(context.Context, *sql.Tx) error) {
	if u.pool == 1 { // The transaction would keep the renewals from the only connection.
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*u.w.timeout)
	defer cancel()
	tx, err := u.db.BeginTx(ctx, nil)
	if err != nil {
		return
	}
	defer tx.Rollback()
	if err := guard(ctx, tx); err != nil {
		return
	}
	var seen sql.NullInt64
	if err := tx.QueryRowContext(ctx, "SELECT token FROM account WHERE name = ?1", name).Scan(&seen); err != nil && !errors.Is(err, sql.ErrNoRows) {
		return
	}
	if seen.Int64 > token {
		u.w.fail("%s: guard of %s let token %d in after %d", u.id, name, token, seen.Int64)
	}
	_, err = tx.ExecContext(ctx, "INSERT INTO account (name, token, writes) VALUES (?1, ?2, 1) ON CONFLICT (name) DO UPDATE SET token = excluded.token, writes = writes + 1", name, token)
	if err != nil {
		return
	}
	switch u.rng.IntN(10) {
	case 0:
		u.work(working, u.w.timeout)
	case 1, 2:
		return
	default:
		u.work(working, 20*time.Millisecond)
	}
	_ = tx.Commit()
}

func (u *user) lockIDs() {
	var ids []string
	for i := range 4 * u.w.names {
		if u.chance(3) {
			ids = append(ids, fmt.Sprint("i", i))
		}
	}
	anchor := fmt.Sprintf("%s#%d", u.id, u.n)
	before := u.tokens(ids)
	if !u.acquireIDs(anchor, ids) {
		return
	}
	ctx, cancel := u.ids.Context(u.life, anchor)
	holds := u.holdIDs(anchor, ids, before)
working:
	for range 1 + u.rng.IntN(3) {
		u.work(ctx, []time.Duration{100 * time.Millisecond, 2 * time.Second, 2 * u.w.ttl}[u.rng.IntN(3)])
		switch u.rng.IntN(4) {
		case 0:
			u.guarded(ctx, "ids/"+anchor, u.ids.Fence(anchor), func(ctx context.Context, tx *sql.Tx) error { return u.ids.Guard(ctx, tx, anchor) })
		case 1:
			_ = u.ids.AssertLocksHeld(u.life, anchor)
		case 2: // Narrowed, or the same again; a set that was lost is acquired afresh.
			endAll(holds)
			ids = ids[:u.rng.IntN(len(ids)+1)]
			if !u.acquireIDs(anchor, ids) {
				break working // What it holds still is released.
			}
			cancel()
			ctx, cancel = u.ids.Context(u.life, anchor)
			holds = u.holdIDs(anchor, ids, nil)
		}
		if u.crashed {
			cancel()
			return // What it holds counts until it is lost.
		}
	}
	cancel()
	endAll(holds)
	done := u.expect("ReleaseLocks", 5*time.Second)
	u.ids.ReleaseLocks(u.releasing(), anchor)
	done()
}

func (u *user) acquireIDs(anchor string, ids []string) bool {
	ctx, cancel := u.context()
	defer cancel()
	var names []string
	for _, id := range ids {
		names = append(names, "ids/"+id)
	}
	defer u.w.waitAll(names, ctx)()
	done := u.expectAfter(ctx, fmt.Sprint("AcquireLocks of ", len(ids)), 0)
	err := u.ids.AcquireLocks(ctx, anchor, ids...)
	done()
	u.check("acquire ids", err)
	u.answered(err)
	return err == nil && len(ids) > 0
}

// tokens returns the largest token of each id.
func (u *user) tokens(ids []string) map[string]int64 {
	tokens := map[string]int64{}
	for _, id := range ids {
		tokens[id] = u.w.tokens["ids/"+id]
	}
	return tokens
}

func (u *user) holdIDs(anchor string, ids []string, before map[string]int64) (holds []*hold) {
	lost, fence := u.ids.Lost(anchor), u.ids.Fence(anchor)
	if fence == 0 {
		return nil // It is lost already.
	}
	for _, id := range ids {
		holds = append(holds, u.w.grant("ids/"+id, u, fence, before[id]))
	}
	ctx, _ := u.ids.Context(context.Background(), anchor) // Ends with the locks.
	context.AfterFunc(ctx, func() {
		for _, h := range holds {
			u.w.lost(h)
		}
		time.Sleep(time.Millisecond)
		select {
		case <-lost:
		default:
			if errors.Is(context.Cause(ctx), coord.ErrLost) {
				u.w.fail("%s: %s is lost, and Lost is not closed", u.id, anchor)
			}
		}
	})
	return holds
}

func endAll(holds []*hold) {
	for _, h := range holds {
		h.end()
	}
}

func (u *user) takeLease() {
	ctx, cancel := u.context()
	defer cancel()
	part := u.rng.IntN(u.w.names)
	name := fmt.Sprint("lease/", part)
	owner := u.id
	done := u.expectAfter(ctx, "Acquire", 0)
	before := u.w.tokens[name]
	lease, err := u.c.Leases().Acquire(ctx, "by hand", part, owner, u.w.ttl)
	done()
	u.check("acquire lease", err)
	u.answered(err)
	if err != nil {
		return
	}
	margin := u.w.ttl / 10
	if time.Until(lease.Deadline) < margin {
		_, _ = u.c.Leases().Release(ctx, "by hand", part, owner)
		return
	}
	h := u.w.grant(name, u, lease.Epoch, before)
	expiry := time.AfterFunc(time.Until(lease.Deadline)-margin, h.end)
	for range u.rng.IntN(4) {
		u.work(u.life, u.w.ttl/4)
		if u.crashed {
			return
		}
		if u.chance(3) {
			u.guarded(u.life, name, lease.Epoch, func(ctx context.Context, tx *sql.Tx) error { return u.c.Leases().Guard(ctx, tx, lease) })
		}
		if h.over {
			break
		}
		done := u.expect("Renew", u.w.timeout)
		renewed, err := u.c.Leases().Renew(u.life, "by hand", []int{part}, owner, u.w.ttl)
		done()
		u.check("renew lease", err)
		switch {
		case err == nil && (len(renewed) == 0 || renewed[0].Epoch != lease.Epoch):
			u.w.lost(h)
		case err == nil && !h.over:
			expiry.Reset(max(time.Until(renewed[0].Deadline)-margin, 0))
		}
	}
	if u.crashed {
		return
	}
	expiry.Stop()
	h.end()
	done = u.expect("Release", u.w.timeout)
	_, err = u.c.Leases().Release(u.releasing(), "by hand", part, owner)
	done()
	u.check("release lease", err)
}

// runGroup runs a group until the process stops.
func (u *user) runGroup() {
	if len(u.w.groups) == 0 {
		u.read()
		return
	}
	g := u.w.groups[u.rng.IntN(len(u.w.groups))]
	if u.runs[g.name] {
		u.read()
		return
	}
	u.runs[g.name] = true
	defer delete(u.runs, g.name)
	ctx, cancel := context.WithCancel(u.life)
	defer cancel()
	if u.chance(3) { // It leaves by itself.
		time.AfterFunc(within(u.rng, time.Second, 5*time.Minute), cancel)
	}
	working := 0
	done := u.expectAfter(ctx, "RunPartitions of "+g.name, u.w.timeout, func() bool { return working > 0 })
	cfg := coord.PartitionConfig{Service: "svc", Node: u.name, Group: g.name, Partitions: g.partitions, TTL: u.w.ttl}
	err := u.c.RunPartitions(ctx, cfg, func(ctx context.Context, lease coord.Lease) error {
		working++
		u.w.working[workName(g, lease.Partition)]++
		defer func() { working--; u.w.working[workName(g, lease.Partition)]-- }()
		return u.runPartition(ctx, g, lease)
	})
	done()
	u.check("run", err)
	u.w.note("%s: the run of %s ended: %v", u.id, g.name, err)
}

func workName(g group, partition int) string { return fmt.Sprintf("run/%s/%d", g.name, partition) }

// finish is the most that the work on a partition takes to return.
func (u *user) finish() time.Duration { return u.w.ttl / 40 }

func (u *user) runPartition(ctx context.Context, g group, lease coord.Lease) error {
	name := workName(g, lease.Partition)
	h := u.w.regrant(name, u, lease.Epoch)
	context.AfterFunc(ctx, func() { // Whatever this waits for then.
		if errors.Is(context.Cause(ctx), coord.ErrLost) {
			u.w.lost(h)
		}
	})
	for {
		if u.chance(4) {
			u.guarded(ctx, name, lease.Epoch, func(ctx context.Context, tx *sql.Tx) error { return u.c.Leases().Guard(ctx, tx, lease) })
		}
		u.work(ctx, 10*time.Second)
		switch {
		case errors.Is(context.Cause(ctx), coord.ErrLost) && u.chance(4): // It goes on, as it should not.
			u.work(context.Background(), 3*u.w.ttl)
			return nil
		case ctx.Err() != nil:
			time.Sleep(within(u.rng, 0, u.finish()))
			h.end()
			return nil
		case u.chance(50):
			context.AfterFunc(ctx, h.end) // It stays its owner's while it waits to be started again.
			return errors.New("the work failed")
		}
	}
}

// read does what only looks, and Purge.
func (u *user) read() {
	ctx, cancel := u.context()
	defer cancel()
	var err error
	done := u.expectAfter(ctx, "a read", 0)
	switch u.rng.IntN(5) {
	case 0:
		_, err = u.c.Leases().Owners(ctx, "by hand")
	case 1:
		_, err = u.c.Members().List(ctx, "svc")
	case 2:
		_, _, err = u.c.Reservations().Find(ctx, scope, "k0")
	case 3:
		err = u.c.Migrate(ctx)
	default:
		_, err = u.c.Purge(ctx, u.w.purge+within(u.rng, 0, 2*u.w.ttl))
	}
	done()
	u.check("read", err)
}
