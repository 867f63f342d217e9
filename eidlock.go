package coord

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// EIDConfig configures an [EIDLocker]. Fields that are zero or less have defaults.
type EIDConfig struct {
	TTL               time.Duration `yaml:"ttl"`               // how long locks outlive a holder that has crashed; default 30 s
	AcquireBackoff    time.Duration `yaml:"acquireBackoff"`    // the first pause of one who waits; each is twice the last, a random half off; default 100 ms
	AcquireMaxBackoff time.Duration `yaml:"acquireMaxBackoff"` // the longest pause; default 2 s
	AcquireDeadline   time.Duration `yaml:"acquireDeadline"`   // bounds each AcquireLocks; default 1 min
	Heartbeat         time.Duration `yaml:"heartbeat"`         // between renewals, at most TTL/2; default the lesser of 10 s and TTL/3
	Owner             string        `yaml:"owner"`             // of the locks, without the space around it; default [Coord.Owner]
}

// EIDLocker locks sets of ids, such as those of the accounts that a transfer
// touches: all of a set or none. A set is locked in the name of an anchor, such as the
// transfer, and kept alive until it is released, or lost. The anchor is the holder:
// callers who use the same one do not exclude each other, and one release ends it for
// all. A set that is lost stays so until ReleaseLocks, or until AcquireLocks begins a
// new one, which has a new channel of Lost.
//
// It is safe for concurrent use. Make one, not one for each caller: callers of one
// Coord queue for ids. A call asks the database when all of its ids are free in the
// process; of two calls that could, the one that came first. While it waits it keeps no
// other call from ids that are free, so that calls for fewer ids may overtake it. Between
// processes there is no order.
type EIDLocker struct {
	*life
	c       *Coord
	sql     *eidSQL
	cfg     EIDConfig
	anchors queue // who acquires for an anchor

	mu   sync.Mutex
	sets map[string]*lockSet // by anchor; a lost one stays until it is released
}

// eidSQL are the statements of locks on sets of ids.
type eidSQL struct {
	table *table

	acquire string // (eids json, owner, anchor, ttl, now, attempt) rows of (granted, fence, eid, owner, expires), or none
	holder  string // (eids json, owner, anchor, now) row of (eid, owner, expires), or none
	undo    string // (eids json, attempt) changes the rows of that attempt
	renew   string // (sets json of [fence, ttl, eids], now) rows of (fence, eid, renewed or locked)
	release string // (eids json, fence) changes the rows with that token
	check   string // (eids json, fence, now) row, or none
	guard   string // (eids json, fence, now) row, or none
}

func (s *eidSQL) load(c *Coord) error {
	var purge string
	ddl, ok, err := load(c.dialect, c.names, "eidlock.sql",
		section{"acquire", &s.acquire}, section{"holder", &s.holder}, section{"undo", &s.undo}, section{"renew", &s.renew},
		section{"release", &s.release}, section{"check", &s.check}, section{"guard", &s.guard}, section{"purge", &purge})
	if ok {
		s.table, err = c.newTable(c.names, "coord_eidlock", ddl, purge, "", s.guard)
	}
	return err
}

// EIDLocker returns a locker of sets of ids. It does no I/O. Lockers of one
// database exclude each other, in any process.
func (c *Coord) EIDLocker(cfg EIDConfig) (*EIDLocker, error) {
	err := cfg.complete(c.Owner())
	if err == nil && c.eids.table == nil {
		err = c.unsupported()
	}
	l := &EIDLocker{life: newLife(c.life), c: c, sql: &c.eids, cfg: cfg, sets: map[string]*lockSet{}}
	if err == nil {
		err = c.own(l.life, l.close)
	}
	if err != nil {
		return nil, wrap("eid locker", err)
	}
	return l, nil
}

// complete fills in the defaults and validates cfg.
func (cfg *EIDConfig) complete(owner string) error {
	atLeast(&cfg.TTL, 30*time.Second)
	atLeast(&cfg.AcquireBackoff, 100*time.Millisecond)
	atLeast(&cfg.AcquireMaxBackoff, max(2*time.Second, cfg.AcquireBackoff))
	atLeast(&cfg.AcquireDeadline, time.Minute)
	atLeast(&cfg.Heartbeat, min(10*time.Second, cfg.TTL/3))
	if cfg.Owner = strings.TrimSpace(cfg.Owner); cfg.Owner == "" {
		cfg.Owner = owner
	}
	switch {
	case cfg.Heartbeat > cfg.TTL/2:
		return invalid("Heartbeat %s is over half of TTL %s", cfg.Heartbeat, cfg.TTL)
	case cfg.AcquireMaxBackoff < cfg.AcquireBackoff:
		return invalid("AcquireBackoff %s is over AcquireMaxBackoff %s", cfg.AcquireBackoff, cfg.AcquireMaxBackoff)
	}
	return cmp.Or(checkTTL(cfg.TTL), checkText("Owner", cfg.Owner))
}

// atLeast replaces what is not more than zero by value.
func atLeast(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}

// lockSet is the ids that an anchor has locked.
type lockSet struct {
	anchor string
	ttl    time.Duration
	fence  int64
	place  *place
	keeper *keeper
	lost   chan struct{}
	untie  func() bool // keeps the end of the hold from closing lost and letting others through

	mu  sync.Mutex
	ids []string // sorted; only ever fewer
}

// AcquireLocks locks all of eIDs in the name of anchor, by one statement, or none of
// them, and waits for those that are held. They stay locked until ReleaseLocks, or
// until they are lost: see [EIDLocker.Lost]. Without eIDs it does nothing.
//
// An anchor that holds locks may acquire the same ids again, or fewer, and then the
// others are freed; an id that it does not hold is [ErrSetWidened], and nothing
// changes. Ids of the same owner under another anchor are held like anybody's. The
// same owner and anchor in an EIDLocker of another Coord, such as a restarted process,
// takes the ids over and fences off the one before.
//
// The wait ends with ctx or after [EIDConfig.AcquireDeadline]: see
// [ErrAcquireTimeout]. An id of a former holder whose Guard is still open is held. A call
// that fails leaves nothing locked, and what anchor had before as it was.
func (l *EIDLocker) AcquireLocks(ctx context.Context, anchor string, eIDs ...string) error {
	ids := slices.Compact(slices.Sorted(slices.Values(eIDs)))
	if err := checkSet(anchor, ids); err != nil || len(ids) == 0 {
		return wrap("acquire locks", err)
	}
	doing := "acquire " + setName(anchor)
	ctx, done, err := l.admit(ctx)
	if err != nil {
		return wrap(doing, err)
	}
	defer done()
	ctx, cancel := context.WithTimeout(ctx, l.cfg.AcquireDeadline)
	defer cancel()
	err = l.inTurn(ctx, doing, anchor, ids)
	if err == nil && l.over() != nil {
		return wrap(doing, ErrClosed) // Close has freed them, or will.
	}
	return err
}

// inTurn waits for earlier calls for the anchor, then acquires.
func (l *EIDLocker) inTurn(ctx context.Context, doing, anchor string, ids []string) error {
	turn := l.anchors.join(anchor)
	defer l.anchors.leave(turn, anchor)
	busy := &HeldError{What: setName(anchor), Owner: l.cfg.Owner}
	queued := !turn.hasTurn()
	if queued {
		select {
		case <-turn.turn:
		case <-ctx.Done():
			return waited(ctx, doing, busy, nil)
		}
	}
	again, err := l.again(ctx, anchor, ids)
	err = wrap(doing, err)
	if !again && err == nil {
		err = l.acquire(ctx, doing, anchor, ids, busy)
	}
	if err != nil && queued && !errors.Is(err, ErrHeld) && !errors.Is(err, ErrSetWidened) {
		return waited(ctx, doing, busy, err)
	}
	return err
}

// checkSet refuses an anchor or ids, sorted, that can't be.
func checkSet(anchor string, ids []string) error {
	if err := checkText("anchor", anchor); err != nil {
		return err
	}
	for _, id := range ids {
		if err := checkText("eID", id); err != nil {
			return err
		}
	}
	return nil
}

// again renews the locks that anchor already has, if it has any, and drops those
// that are not in ids.
func (l *EIDLocker) again(ctx context.Context, anchor string, ids []string) (bool, error) {
	s := l.set(anchor)
	if s == nil {
		return false, nil
	}
	if s.keeper.err() == nil {
		held, err := l.narrow(ctx, s, ids)
		if err != nil || held && s.keeper.err() == nil { // Renewed too late it is lost all the same.
			return held, err
		}
		s.keeper.end(ErrLost)
	}
	if l.remove(anchor) != nil { // A lost anchor acquires afresh.
		l.leave(s)
		bounded(ctx, l.c, func() { l.finish(ctx, s) }) // The database may still be out of reach.
	}
	return false, nil
}

// narrow renews ids, which must be among those of s, then frees the others. It
// returns false if s is lost.
func (l *EIDLocker) narrow(ctx context.Context, s *lockSet, ids []string) (bool, error) {
	before := s.all()
	dropped := slices.DeleteFunc(slices.Clone(before), func(id string) bool {
		_, kept := slices.BinarySearch(ids, id)
		return kept
	})
	if len(dropped) != len(before)-len(ids) {
		return false, ErrSetWidened
	}
	got, err := l.c.renewSets(ctx, where{}, []setOfIDs{{s.fence, s.ttl, ids}}, nil)
	if err != nil || got.fates[0] != renewed {
		return false, err
	}
	s.keeper.renewed(got.sent)
	if len(dropped) == 0 {
		return true, nil
	}
	s.mu.Lock()
	s.ids = ids
	s.mu.Unlock()
	freed := make(chan struct{})
	l.busy.Go(func() {
		defer close(freed)
		_ = l.free(context.WithoutCancel(ctx), s.anchor, jsonList(dropped), s.fence)
		l.c.queue.leave(s.place, l.lines(dropped)...)
	})
	select {
	case <-freed:
	case <-ctx.Done():
	}
	return true, nil
}

// acquire locks ids for an anchor that has none.
func (l *EIDLocker) acquire(ctx context.Context, doing, anchor string, ids []string, busy error) (err error) {
	s := &lockSet{anchor: anchor, ttl: l.cfg.TTL, ids: ids, lost: make(chan struct{})}
	s.place = l.c.queue.join(l.lines(ids)...)
	defer func() {
		if s.keeper == nil { // Also if the driver panics.
			l.c.queue.leaveAfter(err, s.place, l.lines(s.ids)...)
		}
	}()
	got, err := contend(ctx, doing, &l.c.queue, s.place, busy, l.cfg.AcquireBackoff, l.cfg.AcquireMaxBackoff, func() (setGrant, string, error) {
		return l.try(ctx, s)
	})
	if err == nil {
		s.fence = got.fence
		l.hold(s, got.sent.Add(l.cfg.TTL))
	}
	return err
}

// lines returns the names of ids in the queue of the Coord, in order.
func (l *EIDLocker) lines(ids []string) []string {
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = l.sql.table.record + " " + id
	}
	return names
}

// setGrant is a grant, and the time before the statement that was granted was sent.
type setGrant struct {
	sent  time.Time
	fence int64
}

// try asks the database once for the ids of s. With an ErrHeld it also returns the name of
// the id that is held, if known.
func (l *EIDLocker) try(ctx context.Context, s *lockSet) (got setGrant, refused string, err error) {
	if l.over() != nil { // ctx may not know it yet.
		return got, "", wrap("acquire "+setName(s.anchor), ErrClosed)
	}
	list := jsonList(s.ids)
	if len(s.ids) == 1 {
		refused = l.lines(s.ids)[0]
	}
	got, held, err := acquire(ctx, l.c, acquisition[setGrant]{what: setName(s.anchor), table: l.sql.table, now: true, renewed: true,
		try: func(ctx context.Context, on conn, attempt int64) (setGrant, *HeldError, error) {
			return l.send(ctx, on, s, list, attempt)
		},
		undo: func(ctx context.Context, on conn, attempt int64) (bool, error) {
			n, err := on.exec(ctx, l.sql.undo, list, attempt)
			return n > 0, err
		}})
	if err != nil && ctx.Err() == nil && l.c.classify(err) == FailureRetry {
		return got, refused, fmt.Errorf("%w: %w", &HeldError{What: setName(s.anchor)}, err) // Rivals ask all the time.
	}
	if held != nil {
		if id, named := strings.CutPrefix(held.What, "id "); named {
			refused = l.lines([]string{id})[0]
		}
	}
	got, err = granted("acquire "+setName(s.anchor), got, held, err)
	return got, refused, err
}

// send sends the acquisition, again if it has made rows, or if the answer took so long
// that the locks would be lost soon.
func (l *EIDLocker) send(ctx context.Context, on conn, s *lockSet, list string,
	attempt int64) (got setGrant, held *HeldError, err error) {
	var wasGranted bool
	var fence, expires int64
	var id, owner string
	for tries := range 10 { // Purge may take rows away in between, but not ten times.
		wasGranted, id = false, ""
		sent := time.Now()
		_, err := on.row(ctx, l.sql.acquire, []any{list, l.cfg.Owner, s.anchor, micros(l.cfg.TTL), l.c.now(), attempt}, &wasGranted, &fence, &id, &owner, &expires)
		if err == nil && !wasGranted && id == "" {
			_, err = on.row(ctx, l.sql.holder, []any{list, l.cfg.Owner, s.anchor, l.c.now()}, &id, &owner, &expires)
		}
		switch {
		case err != nil:
			return got, nil, err
		case id == "" && !wasGranted:
			return got, nil, errLocked
		case !wasGranted:
			return got, &HeldError{"id " + id, owner, time.UnixMicro(expires)}, nil
		case fence > 0 && (time.Since(sent) < l.cfg.TTL/2 || tries == 9):
			return setGrant{sent, fence}, nil, nil
		}
		if fence > 0 {
			grantedBefore(ctx)
		}
	}
	return got, nil, errLocked
}

// hold records the locks of s and keeps them alive, together with all other sets of the
// Coord.
func (l *EIDLocker) hold(s *lockSet, deadline time.Time) {
	l.c.queue.answer(s.place)
	s.keeper = l.c.sets.keep(s, newHold(), deadline, pace{l.cfg.Heartbeat, l.cfg.TTL, l.cfg.TTL / 10})
	s.untie = context.AfterFunc(s.keeper.ctx, func() { // Nobody waits for the release of what is lost.
		close(s.lost)
		l.leave(s)
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sets[s.anchor] = s
}

// setOfIDs is what is renewed of a set.
type setOfIDs struct {
	fence int64
	ttl   time.Duration
	ids   []string
}

// keepSets renews sets by one statement.
func (c *Coord) keepSets(ctx context.Context, patience time.Duration, sets []*lockSet, answer answer) error {
	asked := make([]setOfIDs, len(sets))
	for i, s := range sets {
		asked[i] = setOfIDs{s.fence, s.ttl, s.all()}
	}
	_, err := c.renewSets(ctx, where{session: c.session, patience: patience, waits: true}, asked, func(r renewal) {
		for i, s := range sets {
			if r.fates[i] == gone && len(s.all()) != len(asked[i].ids) {
				r.fates[i] = busy // Some ids were dropped meanwhile, and the statement has missed them.
			}
		}
		answer(r)
	})
	if errors.Is(err, ErrClosed) {
		err = context.Canceled // The Coord's Close is about to release them, which is no loss.
	}
	return err
}

// renewSets sends a renewal of sets, and returns a fate for each. On the pool it waits for
// rows that another transaction has locked. It calls answer, if not nil, also when nobody waits
// any more.
func (c *Coord) renewSets(ctx context.Context, on where, sets []setOfIDs, answer answer) (renewal, error) {
	list := make([][3]any, len(sets))
	for i, s := range sets {
		list[i] = [3]any{s.fence, micros(s.ttl), s.ids}
	}
	text := jsonList(list)
	type key struct { // Sets that share no id may have equal tokens.
		fence int64
		id    string
	}
	return run(ctx, c, on, c.eids.table, func(ctx context.Context, conn conn) (renewal, error) {
		r := renewal{time.Now(), make([]fate, len(sets))}
		found := make(map[key]fate, len(sets))
		var of key
		var ok bool
		err := conn.each(ctx, c.eids.renew, []any{text, c.now()}, func(row func(...any) error) error {
			err := row(&of.fence, &of.id, &ok)
			found[of] = busy
			if ok {
				found[of] = renewed
			}
			return err
		})
		for i, s := range sets {
			r.fates[i] = found[key{s.fence, s.ids[0]}]
		}
		if err == nil && on.session == nil && slices.Contains(r.fates, busy) {
			err = errLocked
		}
		if err == nil && answer != nil {
			answer(r)
		}
		return r, err
	})
}

// ReleaseLocks frees what anchor has locked, if anything. It goes through even if
// ctx has ended, and takes at most 5 s; what it can't free by then is left to its TTL,
// and logged.
func (l *EIDLocker) ReleaseLocks(ctx context.Context, anchor string) {
	if s := l.remove(anchor); s != nil {
		l.finish(ctx, s)
	}
}

// remove takes out the set of anchor, if there is one, for the caller to finish.
func (l *EIDLocker) remove(anchor string) *lockSet {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.sets[anchor]
	if s == nil || !l.enter() { // Close releases it.
		return nil
	}
	delete(l.sets, anchor)
	return s
}

// finish releases a set that was removed, whatever becomes of ctx.
func (l *EIDLocker) finish(ctx context.Context, s *lockSet) {
	defer l.life.leave()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
	defer cancel()
	rethrow(l.release(ctx, s))
}

// releaseTime is the most that a release takes.
const releaseTime = 5 * time.Second

// release frees what s has, then lets others of this process come after.
func (l *EIDLocker) release(ctx context.Context, s *lockSet) error {
	s.untie()
	_ = s.keeper.stop()
	defer l.leave(s)
	return l.free(ctx, s.anchor, jsonList(s.all()), s.fence)
}

// leave takes s out of the queue.
func (l *EIDLocker) leave(s *lockSet) { l.c.queue.leave(s.place, l.lines(s.all())...) }

// free releases ids of a set, and tries again what fails, for as long as it may. What it
// could not release is logged.
func (l *EIDLocker) free(ctx context.Context, anchor, list string, fence int64) error {
	ctx, cancel := context.WithTimeout(ctx, releaseTime)
	defer cancel()
	for attempts := 1; ; attempts++ {
		_, err := pooled(ctx, l.c, func(ctx context.Context, on conn) (int64, error) { return on.exec(ctx, l.sql.release, list, fence) })
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || errors.As(err, new(panicked)) {
			l.c.cfg.Logger.Warn("coord: locks that were to be released stay until their TTL", "what", setName(anchor), "error", err)
			return err
		}
		_ = after(ctx, backoff(attempts, 10*time.Millisecond, 500*time.Millisecond))
	}
}

// AssertLocksHeld returns nil if every id that anchor has locked is still locked by
// it, in the database, and [ErrLost] if not. It returns nil for an anchor that has
// none, also after ReleaseLocks: nothing was lost. Guard asks more.
func (l *EIDLocker) AssertLocksHeld(ctx context.Context, anchor string) error {
	return wrap("assert "+setName(anchor), l.assert(ctx, anchor))
}

func (l *EIDLocker) assert(ctx context.Context, anchor string) error {
	s, err := l.find(ctx, anchor)
	switch {
	case err != nil || s == nil:
		return err
	case s.keeper.err() != nil:
		return ErrLost
	}
	held, err := s.ask(func(list string) (bool, error) {
		return run(ctx, l.c, where{}, l.sql.table, func(ctx context.Context, on conn) (held bool, err error) {
			_, err = on.row(ctx, l.sql.check, []any{list, s.fence, l.c.now()}, &held)
			return held, err
		})
	})
	if err == nil && !held {
		s.keeper.end(ErrLost)
		err = ErrLost
	}
	return err
}

// Guard checks inside the caller's transaction that all ids of anchor are still
// locked by it, and keeps them so until tx ends: see [LeaseStore.Guard]. It returns
// [ErrLost] for an anchor that has none.
func (l *EIDLocker) Guard(ctx context.Context, tx DBTX, anchor string) error {
	return wrap("guard "+setName(anchor), l.guard(ctx, tx, anchor))
}

func (l *EIDLocker) guard(ctx context.Context, tx DBTX, anchor string) error {
	if err := checkTx(tx); err != nil {
		return err
	}
	s, err := l.find(ctx, anchor)
	switch {
	case err != nil:
		return err
	case s == nil || s.keeper.err() != nil:
		return ErrLost
	}
	held, err := s.ask(func(list string) (bool, error) {
		err := l.c.guard(ctx, tx, l.sql.table, l.sql.guard, list, s.fence, l.c.now())
		if errors.Is(err, ErrLost) {
			return false, nil
		}
		return true, err
	})
	if !held {
		return ErrLost
	}
	return err
}

// Lost returns a channel that is closed when the locks of anchor are lost, and not
// when they are released; nil, which blocks for ever, if it has none. It is closed
// before anyone else can have them, unless this process was suspended: see
// [EIDLocker.Guard].
func (l *EIDLocker) Lost(anchor string) <-chan struct{} {
	if s := l.set(anchor); s != nil {
		return s.lost
	}
	return nil
}

// Fence returns the token of the locks of anchor, larger than that of any earlier set with
// one of these ids; 0 if it has none.
func (l *EIDLocker) Fence(anchor string) int64 {
	if s := l.set(anchor); s != nil {
		return s.fence
	}
	return 0
}

// Context returns a child of parent that ends with the locks of anchor too: its cause is
// [ErrLost] once they are lost, and then or if anchor has none it has ended when Context
// returns. The cancel function must be called as that of [context.WithCancel].
func (l *EIDLocker) Context(parent context.Context, anchor string) (context.Context, context.CancelFunc) {
	if s := l.set(anchor); s != nil {
		return s.keeper.context(parent)
	}
	ctx, cancel := context.WithCancelCause(parent)
	cancel(ErrLost)
	return ctx, func() {}
}

// Close releases the locks of every anchor, in at most 5 s. Calls that wait end
// with [ErrClosed]. It returns nil and may be called again.
func (l *EIDLocker) Close() error {
	l.close()
	return nil
}

func (l *EIDLocker) close() {
	l.end(func() {
		ctx, cancel := context.WithTimeout(context.Background(), releaseTime)
		defer cancel()
		l.releaseAll(ctx)
		l.busy.Wait()     // What is released elsewhere began earlier, and takes as long at most.
		l.releaseAll(ctx) // What was granted meanwhile.
	})
}

// releaseAll releases all sets, a few at a time: one that is stuck does not keep the
// others from it.
func (l *EIDLocker) releaseAll(ctx context.Context) {
	l.mu.Lock()
	sets := slices.Collect(maps.Values(l.sets))
	clear(l.sets)
	l.mu.Unlock()
	var wg sync.WaitGroup
	defer wg.Wait()
	next := make(chan *lockSet, len(sets))
	for _, s := range sets {
		next <- s
	}
	close(next)
	for range min(len(sets), 8) {
		wg.Go(func() {
			for s := range next {
				_ = l.release(ctx, s) // It is logged.
			}
		})
	}
}

// find returns what anchor has locked, nil if nothing, for a caller who asks about
// it.
func (l *EIDLocker) find(ctx context.Context, anchor string) (*lockSet, error) {
	switch err := checkText("anchor", anchor); {
	case err != nil:
		return nil, err
	case l.over() != nil:
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, ended(ctx)
	}
	return l.set(anchor), nil
}

func (l *EIDLocker) set(anchor string) *lockSet {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sets[anchor]
}

// ask tells whether the set is held by what do says of its ids. It asks again if some
// of them were dropped meanwhile: they would be missed.
func (s *lockSet) ask(do func(list string) (bool, error)) (bool, error) {
	for {
		ids := s.all()
		held, err := do(jsonList(ids))
		if held || err != nil || len(ids) == len(s.all()) {
			return held, err
		}
	}
}

// all is the ids of the set.
func (s *lockSet) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ids
}

func setName(anchor string) string { return "locks of " + anchor }
