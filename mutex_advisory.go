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
	"sync"
	"time"
)

// AdvisoryDriver keeps mutexes as session-level advisory locks of Postgres, on one
// connection that it borrows at first use and keeps. They have no TTL and no
// fencing token: a process that crashes frees them at once, and a connection that
// dies unnoticed by the server (a network that drops packets) keeps them for as
// long as the server's tcp_keepalives settings say.
//
// It needs a session of its own, so it refuses poolers in transaction mode, and
// CockroachDB, whose advisory functions do nothing. To tell a pooler it uses a
// second connection of the pool for a moment when it opens its session.
type AdvisoryDriver struct {
	c         *Coord
	prefix    string
	session   *session
	listeners listeners

	mu     sync.Mutex
	closed bool
	dead   int64            // the last session that has ended; sessions count up
	held   map[string]int64 // by name: the session that holds it; 0 while it is asked for
	probed time.Time        // when the last probe that was answered was sent
}

// advisorySQL are the statements of advisory locks.
type advisorySQL struct {
	supported bool
	identify  string // () row of (the session's mark, whether advisory locks do something)
	mark      string // (mark) row of (mark)
	lock      string // (key, mark) row of (granted, or null in another session)
	unlock    string // (key, mark) row of (whether it was held, or null in another session)
	lockTx    string // (key) row of (whether advisory locks do something), once granted
	tryLockTx string // (key) row of (whether advisory locks do something, granted)
}

func (s *advisorySQL) load(c *Coord) error {
	_, ok, err := load(c.dialect, c.names, "advisory.sql",
		section{"identify", &s.identify}, section{"mark", &s.mark}, section{"lock", &s.lock}, section{"unlock", &s.unlock},
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
	d := &AdvisoryDriver{c: c, prefix: cfg.Prefix, session: newSession(c), held: map[string]int64{}}
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
// own. If the connection fails, its locks end with it.
func (d *AdvisoryDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	if err := d.check(name); err != nil {
		return DriverLock{}, wrap("lock", err)
	}
	ctx, done, err := d.c.begin(ctx)
	if err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	defer done()
	// Session locks are re-entrant, so the server would say yes to ourselves.
	if ok, err := d.claim(name); err != nil || !ok {
		return DriverLock{}, first(wrap("lock "+name, err), &HeldError{What: mutexName(name)})
	}
	session, err := onSession(ctx, d.session, func(ctx context.Context, conn *pinned) (int64, error) {
		granted, err := d.ask(ctx, conn, d.c.advisory.lock, name)
		if err != nil || !granted {
			return 0, err
		}
		return d.grant(name, conn.serial), nil
	})
	if session == 0 {
		d.unclaim(name)
	}
	lock := DriverLock{Name: name, session: session}
	switch {
	case err != nil:
		return DriverLock{}, wrap("lock "+name, err)
	case session == 0:
		return DriverLock{}, &HeldError{What: mutexName(name)}
	case !d.holds(lock):
		return DriverLock{}, wrap("lock "+name, errors.New("the session ended as it was granted"))
	}
	return lock, nil
}

// Extend tells whether the session that holds the lock is alive, by asking the
// server. ttl is not used.
func (d *AdvisoryDriver) Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error) {
	called := time.Now()
	ctx, done, err := d.c.begin(ctx)
	if err != nil {
		return false, wrap("probe lock "+lock.Name, err)
	}
	defer done()
	if !d.holds(lock) {
		return false, nil
	}
	_, err = onSession(ctx, d.session, func(ctx context.Context, conn *pinned) (struct{}, error) {
		if conn.serial != lock.session || d.probedSince(called) { // by another lock, while this one waited for its turn
			return struct{}{}, nil
		}
		sent := time.Now()
		err := d.expect(ctx, conn, conn.mark)
		if err == nil {
			d.probe(sent)
		}
		return struct{}{}, err
	})
	return err == nil && d.holds(lock), wrap("probe lock "+lock.Name, err)
}

// Release gives the lock up and tells whether it was held. A lock of a session that
// has ended is not: its name may be another's by now. Release runs even if ctx has
// ended.
func (d *AdvisoryDriver) Release(ctx context.Context, lock DriverLock) (bool, error) {
	ctx, cancel := d.c.detach(ctx)
	defer cancel()
	ctx, done, err := d.c.begin(ctx)
	if err != nil {
		return false, wrap("release lock "+lock.Name, err)
	}
	defer done()
	released, err := onSession(ctx, d.session, func(ctx context.Context, conn *pinned) (bool, error) {
		if conn.serial != lock.session || !d.holds(lock) {
			return false, nil
		}
		was, err := d.ask(ctx, conn, d.c.advisory.unlock, lock.Name)
		if err == nil && !was {
			err = doubt{errors.New("the session did not hold it, and is discarded")}
		}
		if err == nil {
			d.forget(lock)
		}
		return err == nil, err
	})
	return released, wrap("release lock "+lock.Name, err)
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

// ask runs a statement on a lock's key and returns its answer, having made sure
// that the session is the driver's own. After any error the session may hold the
// lock or not, so that it must end.
func (d *AdvisoryDriver) ask(ctx context.Context, conn *pinned, text, name string) (yes bool, err error) {
	if conn.mark == "" {
		if err := d.meet(ctx, conn); err != nil {
			return false, doubt{err}
		}
	}
	var answer sql.NullBool
	rows, err := conn.query(ctx, text, AdvisoryKey(d.prefix+name), conn.mark)
	err = scanRows(rows, err, func() error { return rows.Scan(&answer) })
	switch {
	case err != nil:
		return false, doubt{betrayed(err)}
	case !answer.Valid:
		return false, doubt{errPooler}
	}
	return answer.Bool, nil
}

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

// claim keeps a name for one caller before the server is asked.
func (d *AdvisoryDriver) claim(name string) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false, ErrClosed
	}
	if _, taken := d.held[name]; taken {
		return false, nil
	}
	d.held[name] = 0
	return true, nil
}

func (d *AdvisoryDriver) unclaim(name string) { d.forget(DriverLock{Name: name}) }

// grant notes that a session holds a name, unless that session has been given up
// meanwhile, and returns the session.
func (d *AdvisoryDriver) grant(name string, session int64) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if session > d.dead {
		d.held[name] = session
	}
	return session
}

func (d *AdvisoryDriver) holds(lock DriverLock) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return lock.session > 0 && d.held[lock.Name] == lock.session
}

func (d *AdvisoryDriver) forget(lock DriverLock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if session, ok := d.held[lock.Name]; ok && session == lock.session {
		delete(d.held, lock.Name)
	}
}

func (d *AdvisoryDriver) probe(sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.probed = sent
}

func (d *AdvisoryDriver) probedSince(t time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.probed.After(t)
}

// sessionEnded forgets what a session held, and tells the listeners.
func (d *AdvisoryDriver) sessionEnded(session int64) {
	d.mu.Lock()
	d.dead = session
	var names []string
	for name, holder := range d.held {
		if holder == session {
			names = append(names, name)
			delete(d.held, name)
		}
	}
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
