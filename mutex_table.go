package coord

import (
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
	c         *Coord
	prefix    string
	table     *table
	listeners listeners

	mu     sync.Mutex
	closed bool
	held   map[string]int64 // the tokens of the locks that were granted here and not released

	acquire string // (name, owner, ttl, now, attempt) row of (granted, owner, fence, expires), or none
	holder  string // (name, now) row of (owner, expires), or none
	undo    string // (name, attempt) changes the row of that attempt
	extend  string // (name, fence, ttl, now) changes the row with that token
	release string // (name, fence, attempt) changes the row with that token, once
	fence   string // (name, fence, now) row, or none
}

// TableDriver returns a driver on a table, which is made on first use. It does no
// I/O. Drivers of one table and prefix, in any process, exclude each other.
func (c *Coord) TableDriver(cfg DriverConfig) (*TableDriver, error) {
	d := &TableDriver{c: c, prefix: cfg.Prefix, held: map[string]int64{}}
	n := c.names
	err := checkOptional("Prefix", cfg.Prefix)
	if err == nil {
		n, err = cfg.names(c.names)
	}
	if err == nil {
		err = d.load(n)
	}
	if err == nil && d.table == nil {
		err = c.unsupported()
	}
	if err == nil {
		err = c.own(d)
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
	return n, first(checkIdentifier("Table", schema), checkIdentifier("Table", table))
}

func (d *TableDriver) load(n names) error {
	var purge string
	ddl, ok, err := load(d.c.dialect, n, "mutex.sql",
		section{"acquire", &d.acquire}, section{"holder", &d.holder}, section{"undo", &d.undo}, section{"extend", &d.extend},
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
func (d *TableDriver) Acquire(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	key, err := d.key(name)
	if err := first(err, checkTTL(ttl), d.open()); err != nil {
		return DriverLock{}, wrap("lock", err)
	}
	attempt := d.c.attempt()
	got, err := acquire(ctx, d.c, d.table, mutexName(name), func(ctx context.Context) (locked, error) {
		return d.try(ctx, name, key, ttl, attempt)
	}, func(ctx context.Context) (bool, error) {
		n, err := d.c.exec(ctx, d.undo, key, attempt)
		return n > 0, err
	})
	if err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	if got.held != nil {
		return DriverLock{}, got.held
	}
	if err := d.grant(got.lock); err != nil {
		return DriverLock{}, wrap("lock "+name, err)
	}
	return got.lock, nil
}

// locked is how an acquisition that got its answer ended.
type locked struct {
	lock DriverLock
	held *HeldError // nil if the lock was granted
}

// try sends the acquisition, again if it has made the row, or if it has waited for so
// long, for a guard say, that the lock would be lost soon.
func (d *TableDriver) try(ctx context.Context, name, key string, ttl time.Duration, attempt int64) (locked, error) {
	var granted bool
	var holder string
	var fence, expires int64
	for tries := range 10 { // Purge may take the row away in between, but not ten times.
		granted, holder = false, ""
		sent := time.Now()
		rows, err := d.c.query(ctx, d.acquire, key, d.c.Owner(), micros(ttl), d.c.now(), attempt)
		err = scanRows(rows, err, func() error { return rows.Scan(&granted, &holder, &fence, &expires) })
		if err != nil {
			return locked{}, err
		}
		if granted && fence > 0 && (time.Since(sent) < ttl/2 || tries == 9) {
			return locked{lock: DriverLock{Name: name, Fence: fence, Deadline: sent.Add(ttl)}}, nil
		}
		if !granted {
			break
		}
	}
	if holder == "" {
		rows, err := d.c.query(ctx, d.holder, key, d.c.now())
		if err := scanRows(rows, err, func() error { return rows.Scan(&holder, &expires) }); err != nil {
			return locked{}, err
		}
	}
	held := &HeldError{What: mutexName(name), Owner: holder}
	if holder != "" {
		held.ExpiresAt = time.UnixMicro(expires)
	}
	return locked{held: held}, nil
}

// Extend tells whether the lock is still this holder's, for ttl from now: also if
// it had expired and nobody has taken it, since its token proves that nobody has.
func (d *TableDriver) Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error) {
	key, err := d.key(lock.Name)
	if err := first(err, checkTTL(ttl), d.open()); err != nil {
		return false, wrap("extend lock "+lock.Name, err)
	}
	n, err := onPool(ctx, d.c, d.table, func(ctx context.Context) (int64, error) {
		return d.c.exec(ctx, d.extend, key, lock.Fence, micros(ttl), d.c.now())
	})
	return n > 0, wrap("extend lock "+lock.Name, err)
}

// Release gives the lock up and keeps its row. It tells whether the lock was still
// this holder's: also if it had expired and nobody has taken it. It runs even if
// ctx has ended, for at most [Config.Timeout].
func (d *TableDriver) Release(ctx context.Context, lock DriverLock) (bool, error) {
	key, err := d.key(lock.Name)
	if err := first(err, d.open()); err != nil {
		return false, wrap("release lock "+lock.Name, err)
	}
	ctx, cancel := d.c.detach(ctx)
	defer cancel()
	attempt := d.c.attempt()
	n, err := onPool(ctx, d.c, d.table, func(ctx context.Context) (int64, error) {
		return d.c.exec(ctx, d.release, key, lock.Fence, attempt)
	})
	d.forget(lock)
	return n > 0, wrap("release lock "+lock.Name, err)
}

// Expiring is true.
func (d *TableDriver) Expiring() bool { return true }

// OnLost adds a listener that Close tells of the locks that it leaves to expire.
func (d *TableDriver) OnLost(fn func(names []string)) { d.listeners.add(fn) }

// Close ends the driver. Locks that are held are not renewed any more, and their
// rows are left to expire.
func (d *TableDriver) Close() error {
	d.end()
	d.c.disown(d)
	return nil
}

func (d *TableDriver) end() {
	d.mu.Lock()
	d.closed = true
	names := slices.Collect(maps.Keys(d.held))
	clear(d.held)
	d.mu.Unlock()
	d.listeners.tell(names)
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

func (d *TableDriver) open() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	return nil
}

// grant remembers a lock that was granted, or leaves it to expire as Close does.
func (d *TableDriver) grant(lock DriverLock) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	d.held[lock.Name] = lock.Fence
	return nil
}

func (d *TableDriver) forget(lock DriverLock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held[lock.Name] == lock.Fence {
		delete(d.held, lock.Name)
	}
}
