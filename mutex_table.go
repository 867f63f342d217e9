package coord

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// TableDriver keeps mutexes as rows of a table, with a TTL and a fencing token
// each. It uses the connections of the pool, and works through poolers.
type TableDriver struct {
	*life
	c         *Coord
	prefix    string
	table     *table
	listeners listeners

	mu   sync.Mutex
	held map[string]int64 // the tokens of the locks that were granted here and not released

	acquire string // (name, owner, ttl, now, attempt) row of (granted, owner, fence, expires), or none
	holder  string // (name, now) row of (owner, expires), or none
	undo    string // (name, attempt) changes the row of that attempt
	extend  string // (name, fence, ttl, now) changes the row with that token
	renew   string // (locks json of [name, fence, ttl], now) rows of (name, fence, renewed or locked)
	release string // (name, fence, attempt) changes the row with that token, once
	fence   string // (name, fence, now) row, or none
}

// TableDriver returns a driver on a table, which is made on first use. It does no
// I/O. Drivers of one table and prefix, in any process, exclude each other.
func (c *Coord) TableDriver(cfg DriverConfig) (*TableDriver, error) {
	d := &TableDriver{life: newLife(c.life), c: c, prefix: cfg.Prefix, held: map[string]int64{}}
	n, err := cfg.names(c.names)
	if err = cmp.Or(checkOptional("Prefix", cfg.Prefix), err); err == nil {
		err = d.load(n)
	}
	if err == nil && d.table == nil {
		err = c.unsupported()
	}
	if err == nil {
		err = c.own(d.life, d.close)
	}
	if err != nil {
		return nil, wrap("table driver", err)
	}
	return d, nil
}

// names puts the table's own name into n.
func (cfg DriverConfig) names(n names) (names, error) {
	if cfg.Table == "" {
		return n, nil
	}
	schema, table, qualified := strings.Cut(cfg.Table, ".")
	if !qualified {
		schema, table = n.schema, cfg.Table
	}
	if table == "" || qualified && schema == "" {
		return n, invalid("Table %q is not a name", cfg.Table)
	}
	n.from, n.toSchema, n.to = "coord_mutex", schema, table
	return n, cmp.Or(checkIdentifier("Table", schema), checkIdentifier("Table", table))
}

func (d *TableDriver) load(n names) error {
	var purge string
	ddl, ok, err := load(d.c.dialect, n, "mutex.sql",
		section{"acquire", &d.acquire}, section{"holder", &d.holder}, section{"undo", &d.undo}, section{"extend", &d.extend}, section{"renew", &d.renew},
		section{"release", &d.release}, section{"guard", &d.fence}, section{"purge", &purge})
	if ok {
		d.table, err = d.c.newTable(n, "coord_mutex", ddl, purge, "", d.fence)
	}
	return err
}

// Acquire takes the lock for ttl if it is free, expired or released, and returns an
// [ErrHeld], as a [*HeldError], if not. It may wait for an open Guard of a former
// holder, until ctx ends. If the reply is lost, or ctx ends, what may have been
// granted is released in the background.
func (d *TableDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (lock DriverLock, err error) {
	ctx, done, err := d.admit(ctx)
	if err != nil {
		return lock, wrap("lock "+name, err)
	}
	defer done()
	busy := &HeldError{What: mutexName(name), Owner: d.owner()}
	p, err := d.c.queue.try(ctx, d.queueName(name))
	switch {
	case err != nil:
		return lock, waited(ctx, "lock "+name, busy, nil)
	case p == nil:
		return lock, busy
	}
	defer func() { d.c.queue.leaveAfter(err, p, d.queueName(name)) }()
	return d.take(ctx, name, ttl)
}

func (d *TableDriver) take(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	key, err := d.key(name)
	if err := cmp.Or(err, checkTTL(ttl)); err != nil {
		return DriverLock{}, wrap("lock", err)
	}
	ctx, done, err := d.admit(ctx)
	if err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	defer done()
	got, held, err := acquire(ctx, d.c, acquisition[DriverLock]{what: mutexName(name), table: d.table, renewed: true,
		try: func(ctx context.Context, on conn, attempt int64) (DriverLock, *HeldError, error) {
			return d.try(ctx, on, name, key, ttl, attempt)
		},
		undo: func(ctx context.Context, on conn, attempt int64) (bool, error) {
			n, err := on.exec(ctx, d.undo, key, attempt)
			return n > 0, err
		}})
	if err == nil && held == nil && !d.grant(got) { // Close came first, and nobody would release it.
		end := make(chan error, 1)
		end <- nil
		err = orphan{ErrClosed, d.c.takeBack(mutexName(name), end, func(ctx context.Context) (bool, error) {
			n, err := d.c.pool().exec(ctx, d.release, key, got.Fence, d.c.attempts.Add(1))
			return n > 0, err
		})}
	}
	return granted("lock "+name, got, held, err)
}

// try sends the acquisition, again if it has made the row, or if the answer took so long
// that the lock would be lost soon.
func (d *TableDriver) try(ctx context.Context, on conn, name, key string, ttl time.Duration,
	attempt int64) (lock DriverLock, held *HeldError, err error) {
	var wasGranted bool
	var holder string
	var fence, expires int64
	for tries := range 10 { // Purge may take the row away in between, but not ten times.
		wasGranted, holder = false, ""
		sent := time.Now()
		_, err := on.row(ctx, d.acquire, []any{key, d.c.Owner(), micros(ttl), d.c.now(), attempt}, &wasGranted, &holder, &fence, &expires)
		if err != nil {
			return lock, nil, err
		}
		if wasGranted && fence > 0 && (time.Since(sent) < ttl/2 || tries == 9) {
			return DriverLock{Name: name, Fence: fence, Deadline: sent.Add(ttl)}, nil, nil
		}
		if !wasGranted {
			break
		}
		if fence > 0 {
			grantedBefore(ctx)
		}
	}
	if holder == "" {
		if _, err := on.row(ctx, d.holder, []any{key, d.c.now()}, &holder, &expires); err != nil {
			return lock, nil, err
		}
	}
	if holder == "" {
		return lock, nil, errLocked
	}
	return lock, &HeldError{mutexName(name), holder, time.UnixMicro(expires)}, nil
}

// Extend tells whether the lock is still this holder's, for ttl from now: also if
// it had expired and nobody has taken it, since its token proves that nobody has.
func (d *TableDriver) Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error) {
	key, err := d.key(lock.Name)
	if err := cmp.Or(err, checkTTL(ttl), d.over()); err != nil {
		return false, wrap("extend lock "+lock.Name, err)
	}
	n, err := run(ctx, d.c, d.c.renewing(ttl), d.table, func(ctx context.Context, on conn) (int64, error) {
		return on.exec(ctx, d.extend, key, lock.Fence, micros(ttl), d.c.now())
	})
	return n > 0, wrap("extend lock "+lock.Name, err)
}

// Release gives the lock up and keeps its row. It tells whether the lock was still
// this holder's: also if it had expired and nobody has taken it. It runs even if
// ctx has ended, for at most [Config.Timeout], and is repeated if the connection breaks.
func (d *TableDriver) Release(ctx context.Context, lock DriverLock) (bool, error) {
	key, err := d.key(lock.Name)
	if err := cmp.Or(err, d.over()); err != nil {
		return false, wrap("release lock "+lock.Name, err)
	}
	ctx, cancel := d.c.detach(ctx)
	defer cancel()
	attempt := d.c.attempts.Add(1)
	n, err := run(ctx, d.c, where{}, d.table, func(ctx context.Context, on conn) (int64, error) {
		return on.exec(ctx, d.release, key, lock.Fence, attempt)
	})
	d.forget(lock)
	return n > 0, wrap("release lock "+lock.Name, err)
}

func (d *TableDriver) queue() *queue                { return &d.c.queue }
func (d *TableDriver) queueName(name string) string { return d.table.record + " " + d.prefix + name }
func (d *TableDriver) owner() string                { return d.c.Owner() }
func (d *TableDriver) timeout() time.Duration       { return d.c.cfg.Timeout }

// keep renews a lock together with all others of the Coord in the table.
func (d *TableDriver) keep(lock DriverLock, h hold, cfg MutexConfig) *keeper {
	held := heldLock{d.prefix + lock.Name, lock.Fence, micros(cfg.TTL)}
	return d.batch().keep(held, h, lock.Deadline, pace{cfg.Renew, cfg.TTL, cfg.Margin})
}

// heldLock is a row of the table that is renewed while it has the token.
type heldLock struct {
	key   string
	fence int64
	ttl   int64 // in microseconds
}

// batch returns the batch of the table, which all drivers on it share.
func (d *TableDriver) batch() *batch[heldLock] {
	d.c.mu.Lock()
	defer d.c.mu.Unlock()
	if d.c.locks == nil {
		d.c.locks = map[*table]*batch[heldLock]{}
	}
	if d.c.locks[d.table] == nil {
		d.c.locks[d.table] = newBatch(d.c.cfg.Timeout, d.renewAll)
	}
	return d.c.locks[d.table]
}

// renewAll renews locks by one statement.
func (d *TableDriver) renewAll(ctx context.Context, patience time.Duration, all []heldLock, answer answer) error {
	list := make([][3]any, len(all))
	for i, held := range all {
		list[i] = [3]any{held.key, held.fence, held.ttl}
	}
	text := jsonList(list)
	_, err := run(ctx, d.c, where{session: d.c.session, patience: patience, waits: true}, d.table, func(ctx context.Context, on conn) (struct{}, error) {
		r := renewal{time.Now(), make([]fate, len(all))}
		found := make(map[heldLock]fate, len(all))
		var of heldLock
		var ok bool
		err := on.each(ctx, d.renew, []any{text, d.c.now()}, func(row func(...any) error) error {
			err := row(&of.key, &of.fence, &ok)
			found[of] = busy
			if ok {
				found[of] = renewed
			}
			return err
		})
		for i, held := range all {
			r.fates[i] = found[heldLock{key: held.key, fence: held.fence}]
		}
		if err == nil {
			answer(r)
		}
		return struct{}{}, err
	})
	return wrap("renew locks", err)
}

// Expiring is true.
func (d *TableDriver) Expiring() bool { return true }

// OnLost adds a listener that Close tells of the locks that it leaves to expire.
func (d *TableDriver) OnLost(fn func(names []string)) { d.listeners.add(fn) }

// Close ends the driver. Calls that wait end with [ErrClosed], and a grant that was on its
// way to them is released in the background. Locks that are held are not renewed any more,
// and their rows are left to expire.
func (d *TableDriver) Close() error {
	d.close()
	return nil
}

func (d *TableDriver) close() {
	d.end(func() {
		d.mu.Lock()
		names := slices.Collect(maps.Keys(d.held))
		clear(d.held)
		d.mu.Unlock()
		d.listeners.tell(names)
	})
}

func (d *TableDriver) guard(ctx context.Context, tx DBTX, lock DriverLock) error {
	if err := checkTx(tx); err != nil {
		return err
	}
	return d.c.guard(ctx, tx, d.table, d.fence, d.prefix+lock.Name, lock.Fence, d.c.now())
}

// key is a lock's name in the table.
func (d *TableDriver) key(name string) (string, error) {
	if err := checkText("name", name); err != nil {
		return "", err
	}
	return d.prefix + name, checkText("prefix and name", d.prefix+name)
}

// grant remembers a lock that was granted, unless Close came first.
func (d *TableDriver) grant(lock DriverLock) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over() != nil {
		return false
	}
	d.held[lock.Name] = lock.Fence
	return true
}

func (d *TableDriver) forget(lock DriverLock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held[lock.Name] == lock.Fence {
		delete(d.held, lock.Name)
	}
}
