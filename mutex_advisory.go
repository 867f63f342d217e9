package coord

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// AdvisoryDriver keeps mutexes as session-level advisory locks of Postgres, on one
// connection that it borrows at first use and keeps. They have no TTL and no
// fencing token: a process that crashes frees them at once, and a connection that
// dies unnoticed by the server (a network that drops packets) keeps them for as
// long as the server's tcp_keepalives settings say.
//
// An error of the server about one name loses no other name: the session ends only
// when its connection fails, or when it can't be determined what it holds. A release
// that could not be sent is sent later, and until then the name is held.
//
// It needs a session of its own, so it refuses poolers in transaction mode, and
// CockroachDB, whose advisory functions do nothing. To tell a pooler it uses a
// second connection of the pool for a moment when it opens its session.
type AdvisoryDriver struct {
	*life
	c         *Coord
	prefix    string
	session   *session
	listeners listeners

	mu       sync.Mutex // guards what follows, and every claim
	dead     int64      // the last session that has ended; sessions count up
	count    int64      // the id of the last claim
	claims   map[string]*claim
	pending  []*claim  // to be sent: those that are asked for, and those that were given up
	flushing bool      // a goroutine sends what was given up
	probed   time.Time // when the last statement that was answered was sent
}

// claim is a name from before the server is asked for it until the server has released it or
// its session has ended. So the server, whose session locks are re-entrant, is never asked
// for a name that this driver has.
type claim struct {
	name    string
	id      int64           // DriverLock.session: a later claim to the name has another one
	session int64           // the session that was asked, and holds it if asked is false; 0: none
	asked   bool            // no answer to the request yet
	caller  <-chan struct{} // closed when the caller who asks has left
	owed    bool            // given up
	freed   bool            // released on the server; false again once a Release has reported it
	err     error           // of the request alone: the session is as it was before

	answered context.Context // ends with the answer to the request, or to the release
	answer   context.CancelFunc
}

// advisorySQL are the statements of advisory locks.
type advisorySQL struct {
	supported bool
	identify  string // () row of (the session's mark, whether advisory locks do something)
	mark      string // (mark) row of (mark)
	exchange  string // (requests json of [key, lock or unlock], mark) rows of (place in the list, answer, or null in another session)
	lockTx    string // (key) row of (whether advisory locks do something), once granted
	tryLockTx string // (key) row of (whether advisory locks do something, granted)
}

func (s *advisorySQL) load(c *Coord) error {
	_, ok, err := load(c.dialect, c.names, "advisory.sql",
		section{"identify", &s.identify}, section{"mark", &s.mark}, section{"exchange", &s.exchange},
		section{"lock_tx", &s.lockTx}, section{"try_lock_tx", &s.tryLockTx})
	s.supported = ok
	return err
}

// AdvisoryKey is the key of a name's advisory lock, to look it up in pg_locks: the
// first 8 bytes of SHA-256, big endian. An [AdvisoryDriver] uses the key of its
// prefix + name, [Coord.LockTx] that of the name. All advisory locks of a database
// share the keys, so a prefix also keeps a driver apart from LockTx.
func AdvisoryKey(name string) int64 {
	sum := sha256.Sum256([]byte(name))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// AdvisoryDriver returns a driver on advisory locks. It does no I/O. It returns
// [errors.ErrUnsupported] on engines that have none, and [ErrInvalid] on a pool
// of which it would keep the last connection: it needs one for each driver, and another.
func (c *Coord) AdvisoryDriver(cfg DriverConfig) (*AdvisoryDriver, error) {
	d := &AdvisoryDriver{life: newLife(c.life), c: c, prefix: cfg.Prefix, claims: map[string]*claim{}}
	err := checkOptional("Prefix", cfg.Prefix)
	switch {
	case err != nil:
	case !c.advisory.supported:
		err = c.unsupported()
	case !c.canPin():
		err = invalid("the pool is limited to %d connections, and the driver would keep the last that is not kept yet: allow one more", c.db.Stats().MaxOpenConnections)
	default:
		err = c.own(d.life, d.close)
	}
	if err == nil {
		d.session, err = newSession(c, d.life)
	}
	if err != nil {
		return nil, wrap("advisory driver", err)
	}
	d.session.ended = d.sessionEnded
	c.pins.Add(1)
	return d, nil
}

// Acquire takes the lock if it is free, and returns an [ErrHeld] if not. ttl is
// not used. It returns [errors.ErrUnsupported] where a session is not the driver's
// own. If the connection fails, its locks end with it, and the lock is requested once
// more on a new one if the failed one was not.
func (d *AdvisoryDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	if err := d.check(name); err != nil {
		return DriverLock{}, wrap("lock", err)
	}
	ctx, done, err := d.admit(ctx)
	if err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	defer done()
	h, err := d.claim(name, ctx.Done())
	if err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	if h == nil {
		return DriverLock{}, &HeldError{What: mutexName(name), Owner: d.owner()}
	}
	reused, err := d.send(ctx, h)
	if reused && ctx.Err() == nil && !errors.As(err, new(doubt)) && d.c.classify(err) == FailureConnection {
		// A session that was idle may have been ended by the server long ago, which only the
		// next statement on it finds out.
		_, err = d.send(ctx, h)
	}
	lock, held, err := d.result(h, err)
	rethrow(err)
	return granted("lock "+name, lock, held, err)
}

// send has a turn on the session, and sends what is pending, h among it. It returns early
// when h was answered in another's turn. It also reports whether it failed on a session that
// had been used before.
func (d *AdvisoryDriver) send(ctx context.Context, h *claim) (reused bool, err error) {
	end := time.Now().Add(d.c.cfg.Timeout)
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.answered, cancel)()
	var used atomic.Bool // The function may outlive onSession.
	_, err = onSession(waiting, where{session: d.session}, func(ctx context.Context, conn *pinned) (struct{}, error) {
		used.Store(conn.mark != "")
		return struct{}{}, d.exchange(ctx, conn)
	})
	if err != nil && d.inFlight(h) { // In another's turn: as in its own, the answer is waited for.
		select {
		case <-h.answered.Done():
		case <-time.After(time.Until(end)):
		}
	}
	if h.answered.Err() != nil {
		return false, nil
	}
	if err == nil && ctx.Err() != nil {
		err = ended(ctx)
	}
	return used.Load(), err
}

// exchange sends what is pending, by one statement, and hands out the answers. It makes the
// session fit for that first.
func (d *AdvisoryDriver) exchange(ctx context.Context, conn *pinned) error {
	if conn.mark == "" {
		if err := d.meet(ctx, conn); err != nil {
			return doubt{err}
		}
	}
	batch := d.collect(conn.serial)
	if len(batch) == 0 {
		return nil
	}
	sent := time.Now()
	yes, err := d.request(ctx, conn, batch, false)
	switch {
	case d.refused(err):
		// It may have done all, some or nothing: any answer to unlocking all leaves nothing.
		if _, unsettled := d.request(ctx, conn, batch, true); unsettled != nil {
			return doubt{errors.Join(err, unsettled)}
		}
	case err != nil:
		return err
	}
	return d.hand(conn.serial, batch, yes, err, sent)
}

// request sends one statement for a batch and returns the answers, having made sure that the
// session is the driver's own. After an error that refused accepts it is unknown what the
// statement did; after any other error the session must end.
func (d *AdvisoryDriver) request(ctx context.Context, conn *pinned, batch []*claim, unlock bool) ([]bool, error) {
	list, yes := make([][2]any, len(batch)), make([]bool, len(batch))
	d.mu.Lock()
	for i, h := range batch {
		list[i] = [2]any{AdvisoryKey(d.prefix + h.name), h.asked && !unlock}
	}
	d.mu.Unlock()
	var place int64
	var answer sql.NullBool
	err := conn.each(ctx, d.c.advisory.exchange, []any{jsonList(list), conn.mark}, func(row func(...any) error) error {
		if err := row(&place, &answer); err != nil {
			return err
		}
		if !answer.Valid {
			return errPooler
		}
		yes[place-1] = answer.Bool
		return nil
	})
	if err = betrayed(err); errors.Is(err, errPooler) {
		err = doubt{err}
	}
	return yes, err
}

// hand hands out the answers to a batch, or the failure of a statement that left nothing of
// it. A lock that was granted to a caller who has left is given up.
func (d *AdvisoryDriver) hand(session int64, batch []*claim, yes []bool, failure error, sent time.Time) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if session <= d.dead {
		return nil // The statement was abandoned.
	}
	d.probed = sent
	for i, h := range batch {
		switch ok := failure == nil && yes[i]; {
		case h.asked && ok:
			if h.asked = false; h.owed {
				d.pending = append(d.pending, h)
				d.flushLater()
			}
		case h.asked:
			h.session, h.err = 0, failure
			d.forget(h)
		case failure == nil && !ok:
			err = doubt{errors.New("the session did not hold it, and is discarded")}
			continue
		default:
			h.freed = true
			d.forget(h)
		}
		h.answer()
	}
	return err
}

// Extend reports whether the session that holds the lock is alive, by asking the
// server. ttl is not used. A lock that was given up is not held.
func (d *AdvisoryDriver) Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error) {
	called := time.Now()
	ctx, done, err := d.admit(ctx)
	if err != nil {
		return false, wrap("probe lock "+lock.Name, err)
	}
	defer done()
	session := d.holder(lock)
	if session == 0 {
		return false, nil
	}
	_, err = onSession(ctx, where{session: d.session}, func(ctx context.Context, conn *pinned) (struct{}, error) {
		if conn.serial != session {
			return struct{}{}, nil
		}
		if err := d.exchange(ctx, conn); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, d.probe(ctx, conn, called)
	})
	rethrow(err)
	return err == nil && d.holder(lock) != 0, wrap("probe lock "+lock.Name, err)
}

// probe asks the server once whether the session is still ours, and once more if that
// statement failed and the connection did not. It sends nothing if the session has answered
// since called, for another lock.
func (d *AdvisoryDriver) probe(ctx context.Context, conn *pinned, called time.Time) error {
	d.mu.Lock()
	probed := d.probed
	d.mu.Unlock()
	if probed.After(called) {
		return nil
	}
	sent := time.Now()
	err := d.expect(ctx, conn.on, conn.mark)
	if d.refused(err) {
		sent = time.Now()
		if unsettled := d.expect(ctx, conn.on, conn.mark); unsettled != nil {
			return doubt{errors.Join(err, unsettled)}
		}
		err = nil
	}
	if err == nil {
		d.mu.Lock()
		d.probed = sent
		d.mu.Unlock()
	}
	return err
}

// Release gives the lock up and reports whether it was held. A lock of a session that
// has ended is not: its name may be another's by now. Release runs even if ctx has
// ended. If it returns an error, the lock is released in the background, or its session
// is ended; until then the name is held, and Release may be called again.
func (d *AdvisoryDriver) Release(ctx context.Context, lock DriverLock) (bool, error) {
	ctx, cancel := d.c.detach(ctx)
	defer cancel()
	ctx, done, err := d.admit(ctx)
	if err != nil {
		return false, wrap("release lock "+lock.Name, err)
	}
	defer done()
	h := d.giveUp(lock)
	if h == nil {
		return false, nil
	}
	_, err = d.send(ctx, h)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flushLater()
	rethrow(err)
	if h.freed { // Of several callers one is told.
		h.freed = false
		return true, nil
	}
	return false, wrap("release lock "+lock.Name, err)
}

// flushLater sends in the background what was given up and is still pending. It ends when
// nothing of that is left: each turn that it waits for does the same first, takes no longer
// than [Config.Timeout], and ends the session, and all that is owed with it, if it fails at
// that. When the driver is closed, its session ends. It must be called during an operation,
// with d.mu held.
func (d *AdvisoryDriver) flushLater() {
	if d.flushing || !d.indebted() {
		return
	}
	d.flushing = true
	d.busy.Add(1)
	d.c.busy.Go(func() {
		defer d.busy.Done()
		for attempt := 1; ; attempt++ {
			_, err := onSession(d.ctx, where{session: d.session}, func(ctx context.Context, conn *pinned) (struct{}, error) {
				return struct{}{}, d.exchange(ctx, conn)
			})
			if err != nil && !errors.Is(err, ErrClosed) {
				d.c.cfg.Logger.Warn("coord: a release of advisory locks failed: it is repeated unless their session has ended", "error", err)
			}
			d.mu.Lock()
			d.flushing = d.indebted()
			again := d.flushing
			d.mu.Unlock()
			if !again {
				return
			}
			_ = after(d.ctx, backoff(attempt, 10*time.Millisecond, time.Second))
		}
	})
}

// indebted reports whether something that was given up is left to send. d.mu must be held.
func (d *AdvisoryDriver) indebted() bool {
	return d.over() == nil && slices.ContainsFunc(d.pending, func(h *claim) bool { return h.owed })
}

func (d *AdvisoryDriver) queue() *queue                { return &d.c.queue }
func (d *AdvisoryDriver) queueName(name string) string { return "advisory " + d.prefix + name }
func (d *AdvisoryDriver) owner() string                { return d.c.Owner() }
func (d *AdvisoryDriver) timeout() time.Duration       { return d.c.cfg.Timeout }

func (d *AdvisoryDriver) take(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	return d.Acquire(ctx, name, ttl)
}

func (d *AdvisoryDriver) keep(lock DriverLock, h hold, cfg MutexConfig) *keeper {
	return keepByExtend(d, lock, h, cfg)
}

func (d *AdvisoryDriver) guard(context.Context, DBTX, DriverLock) error {
	return errors.ErrUnsupported
}

// Expiring is false.
func (d *AdvisoryDriver) Expiring() bool { return false }

// OnLost adds a listener that is told, once, of all locks of a session that has
// ended.
func (d *AdvisoryDriver) OnLost(fn func(names []string)) { d.listeners.add(fn) }

// Close ends the driver's session, and with it every lock that is held: they are
// reported as lost. It may be called again.
func (d *AdvisoryDriver) Close() error {
	d.close()
	return nil
}

func (d *AdvisoryDriver) close() { d.end(func() { d.endParts(); d.busy.Wait(); d.c.pins.Add(-1) }) }

// refused reports whether err is the server's word on a statement, after which the
// connection may still be of use. Whether it is, settling shows. The dialect judges more
// strictly, for connections whose loss costs nothing.
func (d *AdvisoryDriver) refused(err error) bool {
	state := sqlState(err)
	return state != "" && !errors.As(err, new(doubt)) && !strings.HasPrefix(state, "08") && !strings.HasPrefix(state, "57P") && state != "25P03"
}

// meet marks a fresh session and makes sure that it stays ours: a pooler in
// transaction mode gives a transaction on a second connection the session that we
// have just marked, or us another one meanwhile or afterwards.
func (d *AdvisoryDriver) meet(ctx context.Context, conn *pinned) error {
	if err := d.expect(ctx, conn.on, ""); err != nil {
		return err
	}
	mark := strconv.FormatUint(rand.Uint64(), 36)
	if err := conn.on.QueryRowContext(ctx, d.c.advisory.mark, mark).Scan(&mark); err != nil {
		return betrayed(err)
	}
	if !d.c.canPin() { // The connection for renewals may be the pool's last: it is given back.
		_, _ = onSession(ctx, where{session: d.c.session}, func(context.Context, *pinned) (struct{}, error) { return struct{}{}, nil })
	}
	tx, err := d.c.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("a second connection of the pool, to tell a pooler by: %w", err)
	}
	defer tx.Rollback()
	if err := cmp.Or(d.expect(ctx, tx, ""), d.expect(ctx, conn.on, mark)); err != nil {
		return err
	}
	tx.Rollback()
	for range 3 { // Servers that take turns.
		if err := d.expect(ctx, conn.on, mark); err != nil {
			return err
		}
	}
	conn.mark = mark
	return nil
}

// expect makes sure that a connection leads to the session with a mark, "" for one
// that nobody has marked. It is not prepared: a pooler may be in between.
func (d *AdvisoryDriver) expect(ctx context.Context, on DBTX, mark string) error {
	var found string
	var works bool
	err := on.QueryRowContext(ctx, d.c.advisory.identify).Scan(&found, &works)
	switch {
	case err != nil:
		return betrayed(err)
	case !works:
		return errCockroach
	case found != mark:
		return errPooler
	}
	return nil
}

// betrayed sees a pooler in the server's error that a prepared statement is not
// there, or already is.
func betrayed(err error) error {
	if slices.Contains([]string{"26000", "42P05", "08P01"}, sqlState(err)) {
		return fmt.Errorf("%w: %w", errPooler, err)
	}
	return err
}

var errCockroach = fmt.Errorf("CockroachDB, whose advisory functions do nothing: %w; use a TableDriver", errors.ErrUnsupported)

var errPooler = fmt.Errorf("the session is not ours alone, as through a pooler such as PgBouncer in transaction mode: %w; "+
	"use a TableDriver, or connect to Postgres directly", errors.ErrUnsupported)

func (d *AdvisoryDriver) check(name string) error {
	return cmp.Or(checkText("name", name), checkOptional("prefix and name", d.prefix+name))
}

// claim keeps a name for one caller and makes it pending. It returns nil if another has it.
func (d *AdvisoryDriver) claim(name string, caller <-chan struct{}) (*claim, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over() != nil {
		return nil, ErrClosed
	}
	if d.claims[name] != nil {
		return nil, nil
	}
	d.count++
	h := &claim{name: name, id: d.count, asked: true, caller: caller}
	d.claims[name] = h
	d.enqueue(h)
	return h, nil
}

// enqueue makes h pending. d.mu must be held.
func (d *AdvisoryDriver) enqueue(h *claim) {
	h.answered, h.answer = context.WithCancel(context.Background())
	d.pending = append(d.pending, h)
}

// collect takes out what is pending and can be sent on a session. A request whose caller has
// left is not sent: the caller is about to take it out.
func (d *AdvisoryDriver) collect(session int64) (batch []*claim) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if session <= d.dead { // This call was abandoned while the session was opened.
		return nil
	}
	d.pending = slices.DeleteFunc(d.pending, func(h *claim) bool {
		mine := h.session == session
		if h.asked {
			select {
			case <-h.caller:
			default:
				mine = true
			}
		}
		if mine {
			h.session = session
			batch = append(batch, h)
		}
		return mine
	})
	return batch
}

// result returns what became of a request that the caller does not wait for any more. What is
// in flight will be given up if it is granted.
func (d *AdvisoryDriver) result(h *claim, err error) (lock DriverLock, held *HeldError, _ error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	answered := h.answered.Err() != nil
	switch {
	case answered && !h.asked && d.claims[h.name] == h:
		return DriverLock{Name: h.name, session: h.id}, nil, nil
	case answered && h.asked && h.err == nil:
		return lock, &HeldError{What: mutexName(h.name)}, nil
	case !answered && h.asked && h.session > 0:
		h.owed = true
	default:
		d.pending = slices.DeleteFunc(d.pending, func(p *claim) bool { return p == h })
		d.forget(h)
	}
	return lock, nil, cmp.Or(h.err, err)
}

// forget makes the name free, if it is still this claim's. d.mu must be held.
func (d *AdvisoryDriver) forget(h *claim) {
	if d.claims[h.name] == h {
		delete(d.claims, h.name)
	}
}

// inFlight reports whether a statement asks for h at this moment.
func (d *AdvisoryDriver) inFlight(h *claim) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return h.asked && h.session > 0 && h.answered.Err() == nil
}

// find returns the claim of a lock that was granted, or nil. d.mu must be held.
func (d *AdvisoryDriver) find(lock DriverLock) *claim {
	if h := d.claims[lock.Name]; h != nil && h.id == lock.session && !h.asked {
		return h
	}
	return nil
}

// holder returns the session that holds the lock, or 0.
func (d *AdvisoryDriver) holder(lock DriverLock) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if h := d.find(lock); h != nil && !h.owed {
		return h.session
	}
	return 0
}

// giveUp returns the claim of a lock and makes it owed, or returns nil.
func (d *AdvisoryDriver) giveUp(lock DriverLock) *claim {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.find(lock)
	if h != nil && !h.owed {
		h.owed = true
		d.enqueue(h)
	}
	return h
}

// sessionEnded ends what a session held, and tells the listeners. What it was asked for is
// pending again. The names are claimed until all listeners know: they are told of names, and
// would take a lock that is granted meanwhile for the one that was lost.
func (d *AdvisoryDriver) sessionEnded(session int64) {
	d.mu.Lock()
	d.dead = session
	d.pending = slices.DeleteFunc(d.pending, func(h *claim) bool { return h.owed && h.session == session })
	var names []string
	var over []*claim
	for name, h := range d.claims {
		switch {
		case h.session != session:
		case h.asked && !h.owed:
			h.session = 0
			d.pending = append(d.pending, h)
		case h.asked:
			delete(d.claims, name)
		default:
			h.asked, h.session, h.err = true, 0, errors.New("the session ended as it was granted")
			names, over = append(names, name), append(over, h)
		}
	}
	d.mu.Unlock()
	d.listeners.tell(names)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range over {
		d.forget(h)
	}
}

// LockTx takes an advisory lock that lasts until tx ends, and waits for it as long
// as ctx allows, see [ErrAcquireTimeout]: a context that ends while it waits ends
// the transaction too. It excludes, and is excluded by, an [AdvisoryDriver] without
// a prefix, and works through poolers in transaction mode. It runs on the caller's
// connection, and it returns with its context only if the database driver does.
func (c *Coord) LockTx(ctx context.Context, tx DBTX, name string) error {
	err := c.TryLockTx(ctx, tx, name)
	if !errors.Is(err, ErrHeld) {
		return err
	}
	var works bool
	var void string
	if _, failure := c.within(tx).row(ctx, c.advisory.lockTx, []any{AdvisoryKey(name)}, &works, &void); failure != nil {
		return waited(ctx, "lock "+name, err, wrap("lock "+name, failure))
	}
	return nil
}

// TryLockTx takes an advisory lock that lasts until tx ends, and returns an
// [ErrHeld] if it is not free; see [Coord.LockTx].
func (c *Coord) TryLockTx(ctx context.Context, tx DBTX, name string) error {
	err := cmp.Or(checkText("name", name), checkTx(tx))
	switch {
	case err != nil:
	case !c.advisory.supported:
		err = c.unsupported()
	case c.over() != nil:
		err = ErrClosed
	case ctx.Err() != nil:
		err = ended(ctx)
	default:
		var works, granted bool
		_, err = c.within(tx).row(ctx, c.advisory.tryLockTx, []any{AdvisoryKey(name)}, &works, &granted)
		switch {
		case err == nil && !works:
			err = errCockroach
		case err == nil && !granted:
			return &HeldError{What: "advisory lock " + name}
		}
	}
	return wrap("lock "+name, err)
}
