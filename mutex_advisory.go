package coord

import (
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
	c         *Coord
	prefix    string
	session   *session
	listeners listeners

	mu       sync.Mutex // guards what follows, and every sessionLock
	closed   bool
	dead     int64                   // the last session that has ended; sessions count up
	claims   int64                   // the id of the last claim
	held     map[string]*sessionLock // by name
	owed     []*sessionLock          // those that are given up and not yet released on the server
	flushing bool                    // a goroutine sends what is owed
	probed   time.Time               // when the last probe that was answered was sent
}

// sessionLock is one claim to a name, from before the server is asked until the server has
// released it or its session has ended.
type sessionLock struct {
	name    string
	id      int64 // DriverLock.session: a later claim to the name has another one
	session int64 // the session that holds it; 0 while it is requested
	owed    bool  // given up
	freed   bool  // released on the server; false again once a Release has reported it
}

// advisorySQL are the statements of advisory locks.
type advisorySQL struct {
	supported bool
	identify  string // () row of (the session's mark, whether advisory locks do something)
	mark      string // (mark) row of (mark)
	lock      string // (key, mark) row of (granted, or null in another session)
	unlock    string // (key, mark) row of (whether it was held, or null in another session)
	unlockAll string // (keys json, mark) row of (whether all were held, or null in another session)
	lockTx    string // (key) row of (whether advisory locks do something), once granted
	tryLockTx string // (key) row of (whether advisory locks do something, granted)
}

func (s *advisorySQL) load(c *Coord) error {
	_, ok, err := load(c.dialect, c.names, "advisory.sql",
		section{"identify", &s.identify}, section{"mark", &s.mark}, section{"lock", &s.lock}, section{"unlock", &s.unlock},
		section{"unlock_all", &s.unlockAll},
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
// that is limited to one connection, which it would keep for itself.
func (c *Coord) AdvisoryDriver(cfg DriverConfig) (*AdvisoryDriver, error) {
	d := &AdvisoryDriver{
		c: c, prefix: cfg.Prefix, session: newSession(c), held: map[string]*sessionLock{},
	}
	d.session.ended = d.sessionEnded
	err := checkOptional("Prefix", cfg.Prefix)
	switch {
	case err != nil:
	case !c.advisory.supported:
		err = c.unsupported()
	case c.db.Stats().MaxOpenConnections == 1:
		err = invalid("the pool is limited to one connection, which the driver would keep: allow two or more")
	default:
		err = c.own(d)
	}
	if err != nil {
		return nil, wrap("advisory driver", err)
	}
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
	ctx, done, err := d.c.begin(ctx)
	if err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	defer done()
	// Session locks are re-entrant, so the server would grant it to us again.
	h, err := d.claim(name)
	if err != nil || h == nil {
		return DriverLock{}, first(wrap("lock "+name, err), &HeldError{What: mutexName(name)})
	}
	session, err := d.request(ctx, name)
	if err == nil && session == 0 {
		d.unclaim(h)
		return DriverLock{}, &HeldError{What: mutexName(name)}
	}
	if err == nil && !d.grant(h, session) {
		err = errors.New("the session ended as it was granted")
	}
	if err != nil {
		d.unclaim(h)
		return DriverLock{}, wrap("lock "+name, err)
	}
	return DriverLock{Name: name, session: h.id}, nil
}

// request asks the server for a lock, and returns the session that was granted it, or
// 0. A session that was idle may have been ended by the server long ago, which only the
// next statement on it finds out: the request is then made again on a new session.
func (d *AdvisoryDriver) request(ctx context.Context, name string) (int64, error) {
	got, reused, err := d.requestOnce(ctx, name)
	if reused && ctx.Err() == nil && d.disconnected(err) {
		got, _, err = d.requestOnce(ctx, name)
	}
	return got.session, first(err, got.failure)
}

// disconnected reports whether an operation failed because its connection did.
func (d *AdvisoryDriver) disconnected(err error) bool {
	return !errors.As(err, new(doubt)) && d.c.classify(err) == FailureConnection
}

// answer is the server's answer to a request for a lock.
type answer struct {
	session int64 // the session that holds the lock, or 0
	failure error // of the request alone: the session is as it was before
	notSent bool  // the request is not sent yet, since other work took the time
}

// requestOnce makes a request without repeating it. If it failed, it also reports whether
// the session was opened by an earlier operation.
func (d *AdvisoryDriver) requestOnce(
	ctx context.Context, name string,
) (got answer, reused bool, err error) {
	var used atomic.Bool // The function may outlive onSession.
	got.notSent = true
	for flush := true; err == nil && got.notSent; flush = false {
		got, err = onSession(ctx, d.session, func(ctx context.Context, conn *pinned) (answer, error) {
			used.Store(conn.mark != "")
			sent := time.Now()
			if err := d.ready(ctx, conn, flush); err != nil {
				return answer{}, err
			}
			if flush && used.Load() && time.Since(sent) > d.c.cfg.Timeout/4 {
				// Timeout bounds the whole turn: on a slow server, two statements in one
				// turn would end the session.
				return answer{notSent: true}, nil
			}
			return d.lock(ctx, conn, name)
		})
	}
	return got, err != nil && used.Load(), err
}

// ready makes the session fit for a request.
func (d *AdvisoryDriver) ready(ctx context.Context, conn *pinned, flush bool) error {
	if conn.mark == "" {
		if err := d.meet(ctx, conn); err != nil {
			return doubt{err}
		}
	}
	if flush {
		return d.flush(ctx, conn)
	}
	return nil
}

// lock requests a lock on the session.
func (d *AdvisoryDriver) lock(ctx context.Context, conn *pinned, name string) (answer, error) {
	granted, err := d.ask(ctx, conn, d.c.advisory.lock, d.key(name))
	switch {
	case d.refused(err):
		if _, unsettled := d.ask(ctx, conn, d.c.advisory.unlock, d.key(name)); unsettled != nil {
			return answer{}, doubt{errors.Join(err, unsettled)}
		}
		return answer{failure: err}, nil
	case err != nil || !granted:
		return answer{}, err
	}
	return answer{session: conn.serial}, nil
}

// Extend reports whether the session that holds the lock is alive, by asking the
// server. ttl is not used. A lock that was given up is not held.
func (d *AdvisoryDriver) Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error) {
	called := time.Now()
	ctx, done, err := d.c.begin(ctx)
	if err != nil {
		return false, wrap("probe lock "+lock.Name, err)
	}
	defer done()
	session := d.holder(lock)
	if session == 0 {
		return false, nil
	}
	_, err = onSession(ctx, d.session, func(ctx context.Context, conn *pinned) (struct{}, error) {
		if conn.serial != session {
			return struct{}{}, nil
		}
		return struct{}{}, first(d.flush(ctx, conn), d.probe(ctx, conn, called))
	})
	return err == nil && d.holder(lock) != 0, wrap("probe lock "+lock.Name, err)
}

// probe asks the server once whether the session is still ours, and once more if that
// statement failed and the connection did not. It sends nothing if the session was
// probed since called, for another lock.
func (d *AdvisoryDriver) probe(ctx context.Context, conn *pinned, called time.Time) error {
	if d.probedSince(called) {
		return nil
	}
	sent := time.Now()
	err := d.expect(ctx, conn, conn.mark)
	if d.refused(err) {
		sent = time.Now()
		if unsettled := d.expect(ctx, conn, conn.mark); unsettled != nil {
			return doubt{errors.Join(err, unsettled)}
		}
		err = nil
	}
	if err == nil {
		d.probedAt(sent)
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
	ctx, done, err := d.c.begin(ctx)
	if err != nil {
		return false, wrap("release lock "+lock.Name, err)
	}
	defer done()
	h := d.giveUp(lock)
	if h == nil {
		return false, nil
	}
	_, err = onSession(ctx, d.session, d.pay)
	if d.credit(h) { // Perhaps another operation has released it, while this one was in the queue.
		return true, nil
	}
	if err != nil {
		d.flushLater()
	}
	return false, wrap("release lock "+lock.Name, err)
}

// pay is flush as an operation of its own.
func (d *AdvisoryDriver) pay(ctx context.Context, conn *pinned) (struct{}, error) {
	return struct{}{}, d.flush(ctx, conn)
}

// flush releases on the server what was given up. Every operation on the session does
// this first, so that releases never wait for each other: what has queued for the
// session goes in one statement.
func (d *AdvisoryDriver) flush(ctx context.Context, conn *pinned) error {
	owed := d.owedBy(conn.serial)
	if len(owed) == 0 {
		return nil
	}
	text, arg := d.c.advisory.unlock, d.key(owed[0].name)
	if len(owed) > 1 {
		keys := make([]int64, len(owed))
		for i, h := range owed {
			keys[i] = AdvisoryKey(d.prefix + h.name)
		}
		text, arg = d.c.advisory.unlockAll, jsonList(keys)
	}
	sent := time.Now()
	were, err := d.ask(ctx, conn, text, arg)
	switch {
	case d.refused(err):
		// It may have released all, some or none of them: any answer to the same again
		// leaves none.
		if _, unsettled := d.ask(ctx, conn, text, arg); unsettled != nil {
			return doubt{errors.Join(err, unsettled)}
		}
	case err != nil:
		return err
	case !were:
		return doubt{errors.New("the session did not hold it, and is discarded")}
	}
	d.free(owed)
	d.probedAt(sent) // It was answered by the session that is ours.
	return nil
}

// flushLater sends in the background what is owed. It ends when nothing is owed any
// more: each operation that it waits for does the same first, takes no longer than
// [Config.Timeout], and ends the session, and all that is owed with it, if it fails at
// that. When the driver is closed, its session ends. It must be called during an
// operation.
func (d *AdvisoryDriver) flushLater() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.flushing || !d.indebted() {
		return
	}
	d.flushing = true
	d.c.busy.Go(func() {
		for attempt := 1; ; attempt++ {
			_, err := onSession(d.c.life, d.session, d.pay)
			if err != nil && !errors.Is(err, ErrClosed) {
				d.c.cfg.Logger.Warn("coord: a release of advisory locks failed: it is repeated unless their session has ended", "error", err)
			}
			if d.flushed() {
				return
			}
			select {
			case <-d.c.life.Done():
			case <-time.After(backoff(attempt, 10*time.Millisecond, time.Second)):
			}
		}
	})
}

// flushed reports whether flushLater is done.
func (d *AdvisoryDriver) flushed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flushing = d.indebted()
	return !d.flushing
}

// indebted reports whether something is left to flush. d.mu must be held.
func (d *AdvisoryDriver) indebted() bool {
	return len(d.owed) > 0 && !d.closed && d.c.life.Err() == nil
}

// Expiring is false.
func (d *AdvisoryDriver) Expiring() bool { return false }

// OnLost adds a listener that is told, once, of all locks of a session that has
// ended.
func (d *AdvisoryDriver) OnLost(fn func(names []string)) { d.listeners.add(fn) }

// Close ends the driver's session, and with it every lock that is held: they are
// reported as lost. It may be called again.
func (d *AdvisoryDriver) Close() error {
	_, done, err := d.c.begin(context.Background())
	if err != nil {
		return nil // Close of the Coord does it.
	}
	defer done()
	d.end()
	d.c.disown(d)
	return nil
}

func (d *AdvisoryDriver) end() {
	d.mu.Lock()
	again := d.closed
	d.closed = true
	d.mu.Unlock()
	if !again {
		d.session.close()
	}
}

// ask runs a statement on the keys of locks and returns its answer, having made sure
// that the session is the driver's own. After an error that refused accepts it is
// unknown what the statement did; after any other error the session must end.
func (d *AdvisoryDriver) ask(ctx context.Context, conn *pinned, text string, keys any) (yes bool, err error) {
	var answer sql.NullBool
	rows, err := conn.query(ctx, text, keys, conn.mark)
	err = betrayed(scanRows(rows, err, func() error { return rows.Scan(&answer) }))
	switch {
	case errors.Is(err, errPooler):
		return false, doubt{err}
	case err != nil:
		return false, err
	case !answer.Valid:
		return false, doubt{errPooler}
	}
	return answer.Bool, nil
}

// refused reports whether err is the server's word on a statement, after which the
// connection may still be of use. Whether it is, settling shows. The dialect judges more
// strictly, for connections whose loss costs nothing.
func (d *AdvisoryDriver) refused(err error) bool {
	var server interface{ SQLState() string }
	if err == nil || errors.As(err, new(doubt)) || !errors.As(err, &server) {
		return false
	}
	state := server.SQLState()
	return !strings.HasPrefix(state, "08") && !strings.HasPrefix(state, "57P") && state != "25P03"
}

// key is the key of a lock as it is sent.
func (d *AdvisoryDriver) key(name string) any { return AdvisoryKey(d.prefix + name) }

// meet marks a fresh session and makes sure that it stays ours: a pooler in
// transaction mode gives a transaction on a second connection the session that we
// have just marked, or us another one meanwhile or afterwards.
func (d *AdvisoryDriver) meet(ctx context.Context, conn *pinned) error {
	if err := d.expect(ctx, conn, ""); err != nil {
		return err
	}
	mark := strconv.FormatUint(rand.Uint64(), 36)
	if err := conn.QueryRowContext(ctx, d.c.advisory.mark, mark).Scan(&mark); err != nil {
		return betrayed(err)
	}
	tx, err := d.c.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("a second connection of the pool, to tell a pooler by: %w", err)
	}
	defer tx.Rollback()
	if err := first(d.expect(ctx, tx, ""), d.expect(ctx, conn, mark)); err != nil {
		return err
	}
	tx.Rollback()
	for range 3 { // Servers that take turns.
		if err := d.expect(ctx, conn, mark); err != nil {
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
	var server interface{ SQLState() string }
	if errors.As(err, &server) && slices.Contains([]string{"26000", "42P05", "08P01"}, server.SQLState()) {
		return fmt.Errorf("%w: %w", errPooler, err)
	}
	return err
}

var errCockroach = fmt.Errorf("CockroachDB, whose advisory functions do nothing: %w; use a TableDriver", errors.ErrUnsupported)

var errPooler = fmt.Errorf("the session is not ours alone, as through a pooler such as PgBouncer in transaction mode: %w; "+
	"use a TableDriver, or connect to Postgres directly", errors.ErrUnsupported)

func (d *AdvisoryDriver) check(name string) error {
	return first(checkText("name", name), checkOptional("prefix and name", d.prefix+name))
}

// claim keeps a name for one caller before the server is asked. It returns nil if
// another has it.
func (d *AdvisoryDriver) claim(name string) (*sessionLock, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	if d.held[name] != nil {
		return nil, nil
	}
	d.claims++
	h := &sessionLock{name: name, id: d.claims}
	d.held[name] = h
	return h, nil
}

func (d *AdvisoryDriver) unclaim(h *sessionLock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.forget(h)
}

// forget makes the name free, if it is still this hold's. d.mu must be held.
func (d *AdvisoryDriver) forget(h *sessionLock) {
	if d.held[h.name] == h {
		delete(d.held, h.name)
	}
}

// grant notes that a session holds a name, unless that session has ended meanwhile.
func (d *AdvisoryDriver) grant(h *sessionLock, session int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if session <= d.dead {
		return false
	}
	h.session = session
	return true
}

// find returns the hold of a lock that was granted, or nil. d.mu must be held.
func (d *AdvisoryDriver) find(lock DriverLock) *sessionLock {
	if h := d.held[lock.Name]; h != nil && h.id == lock.session && h.session > 0 {
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

// giveUp returns the hold of a lock and makes it owed, or returns nil.
func (d *AdvisoryDriver) giveUp(lock DriverLock) *sessionLock {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.find(lock)
	if h != nil && !h.owed {
		h.owed = true
		d.owed = append(d.owed, h)
	}
	return h
}

// owedBy returns what a session has to release.
func (d *AdvisoryDriver) owedBy(session int64) (owed []*sessionLock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range d.owed {
		if h.session == session {
			owed = append(owed, h)
		}
	}
	return owed
}

// free notes that the server has released what was owed.
func (d *AdvisoryDriver) free(released []*sessionLock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range released {
		h.freed = d.held[h.name] == h // Not if the session has ended meanwhile, and was reported as lost.
		d.forget(h)
	}
	d.owed = slices.DeleteFunc(d.owed, func(h *sessionLock) bool { return h.freed })
}

// credit reports, once, that a hold was released.
func (d *AdvisoryDriver) credit(h *sessionLock) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	freed := h.freed
	h.freed = false
	return freed
}

func (d *AdvisoryDriver) probedAt(sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.probed = sent
}

func (d *AdvisoryDriver) probedSince(t time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.probed.After(t)
}

// sessionEnded forgets what a session held, and tells the listeners. No other session
// can be granted these names before it returns: the session's turn is still taken.
func (d *AdvisoryDriver) sessionEnded(session int64) {
	d.mu.Lock()
	d.dead = session
	var names []string
	for name, h := range d.held {
		if h.session == session {
			names = append(names, name)
			delete(d.held, name)
		}
	}
	d.owed = slices.DeleteFunc(d.owed, func(h *sessionLock) bool { return h.session == session })
	d.mu.Unlock()
	d.listeners.tell(names)
}

// LockTx takes an advisory lock that lasts until tx ends, and waits for it as long
// as ctx allows, see [ErrAcquireTimeout]: a context that ends while it waits ends
// the transaction too. It excludes, and is excluded by, an [AdvisoryDriver] without
// a prefix, and works through poolers in transaction mode. It runs on the caller's
// connection, and with a driver that heeds no context it does not either.
func (c *Coord) LockTx(ctx context.Context, tx DBTX, name string) error {
	err := c.TryLockTx(ctx, tx, name)
	if !errors.Is(err, ErrHeld) {
		return err
	}
	var works bool
	var void string
	if failure := c.inTx(ctx, tx, c.advisory.lockTx, []any{AdvisoryKey(name)}, &works, &void); failure != nil {
		return waited(ctx, "lock "+name, err, wrap("lock "+name, failure))
	}
	return nil
}

// TryLockTx takes an advisory lock that lasts until tx ends, and returns an
// [ErrHeld] if it is not free; see [Coord.LockTx].
func (c *Coord) TryLockTx(ctx context.Context, tx DBTX, name string) error {
	err := first(checkText("name", name), checkTx(tx))
	switch {
	case err != nil:
	case !c.advisory.supported:
		err = c.unsupported()
	case c.life.Err() != nil:
		err = ErrClosed
	case ctx.Err() != nil:
		err = ended(ctx)
	default:
		var works, granted bool
		err = c.inTx(ctx, tx, c.advisory.tryLockTx, []any{AdvisoryKey(name)}, &works, &granted)
		switch {
		case err == nil && !works:
			err = errCockroach
		case err == nil && !granted:
			return &HeldError{What: "advisory lock " + name}
		}
	}
	return wrap("lock "+name, err)
}
