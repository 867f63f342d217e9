package coord

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// MutexDriver is where mutexes are kept: a [TableDriver] or an [AdvisoryDriver].
// Its methods are safe for concurrent use, never wait for a lock, and return soon
// after their context has ended.
type MutexDriver interface {
	// Acquire takes the lock for ttl, or returns an ErrHeld, also when this driver
	// itself holds it.
	Acquire(ctx context.Context, name string, ttl time.Duration) (DriverLock, error)
	// Extend tells whether the lock is still held, for ttl from now. No is final.
	Extend(ctx context.Context, lock DriverLock, ttl time.Duration) (bool, error)
	// Release gives the lock up and tells whether it was held until now. It runs
	// even if ctx has ended.
	Release(ctx context.Context, lock DriverLock) (bool, error)
	// Expiring tells whether locks end by their TTL, or with the session that
	// holds them.
	Expiring() bool
	// OnLost adds a listener that is told, once and with every name, that what
	// held these locks has ended. It must not block.
	OnLost(func(names []string))
	// Close ends the driver; see the drivers for what becomes of its locks.
	Close() error
}

// DriverLock is a lock as its driver knows it.
type DriverLock struct {
	Name     string
	Fence    int64     // the fencing token, larger than all before it for this name; 0: none
	Deadline time.Time // local, monotonic: the send + TTL; zero if it does not expire
	session  int64     // of an AdvisoryDriver: the claim
}

// DriverConfig configures a driver. Its zero value is ready to use.
type DriverConfig struct {
	// Prefix is put before every lock's name.
	Prefix string
	// Table is the table of a [TableDriver], which may name a schema ("app.locks");
	// without one it is in [Config.Schema]. "" is [Config.Prefix] + "mutex".
	Table string
}

// MutexConfig configures a [Mutex]. Zero fields have defaults.
type MutexConfig struct {
	TTL      time.Duration // how long a lock outlives a holder that has crashed; default 30 s
	Renew    time.Duration // between renewals, at most TTL/2; default TTL/3
	Margin   time.Duration // how long before its deadline a lock that can't be renewed is lost; default TTL/10
	RetryMin time.Duration // the first pause of one who waits; each is twice the last, a random half off; default 10 ms
	RetryMax time.Duration // the longest pause; default 100 ms
}

// Mutex locks names, so that one holder of each exists among all processes that
// share the driver's database. It is safe for concurrent use.
//
// Callers of one process queue for a name, first come first served, and only the
// first of them asks the database. Between processes there is no order.
type Mutex struct {
	d   locker
	cfg MutexConfig

	mu    sync.Mutex
	locks map[string]*Lock // asked for or held
}

// locker is what a Mutex needs of a driver.
type locker interface {
	MutexDriver
	ours
	queue() *queue
	queueName(name string) string // of a lock's name, in the queue
	// take is Acquire for a caller whose turn it is in the queue.
	take(ctx context.Context, name string, ttl time.Duration) (DriverLock, error)
	keep(lock DriverLock, h hold, cfg MutexConfig) *keeper
}

// ours is what a driver of this package does also for a driver that embeds it.
type ours interface {
	admit(ctx context.Context) (_ context.Context, done func(), err error)
	owner() string          // this process
	timeout() time.Duration // [Config.Timeout]
	guard(ctx context.Context, tx DBTX, lock DriverLock) error
}

// foreign makes a locker of another driver, all of whose methods are called.
type foreign struct {
	MutexDriver
	ours
	callers queue
}

func (f *foreign) queue() *queue                { return &f.callers }
func (f *foreign) queueName(name string) string { return name }

func (f *foreign) take(ctx context.Context, name string, ttl time.Duration) (DriverLock, error) {
	return f.Acquire(ctx, name, ttl)
}

func (f *foreign) keep(lock DriverLock, h hold, cfg MutexConfig) *keeper {
	return keepByExtend(f, lock, h, cfg)
}

// theirs is [ours] of a driver that has nothing to do with this package.
type theirs struct{}

func (theirs) admit(ctx context.Context) (context.Context, func(), error) {
	return ctx, func() {}, nil
}

func (theirs) owner() string                                 { return "" }
func (theirs) timeout() time.Duration                        { return defaultTimeout }
func (theirs) guard(context.Context, DBTX, DriverLock) error { return errors.ErrUnsupported }

// keepByExtend keeps one lock by its driver's Extend.
func keepByExtend(d locker, lock DriverLock, h hold, cfg MutexConfig) *keeper {
	p := pace{cfg.Renew, cfg.TTL, cfg.Margin}
	if !d.Expiring() {
		p.ttl = 0
	}
	return keepAlone(h, lock.Deadline, p, d.timeout(), func(ctx context.Context) (bool, error) { return d.Extend(ctx, lock, cfg.TTL) })
}

// NewMutex returns a Mutex on a driver. Make one, not one per lock: the driver
// remembers each. It does no I/O. A Mutex has no Close: unlock what was locked, then
// close the driver.
func NewMutex(d MutexDriver, cfg MutexConfig) (*Mutex, error) {
	if d == nil {
		return nil, wrap("new mutex", invalid("the driver is nil"))
	}
	if err := cfg.complete(); err != nil {
		return nil, wrap("new mutex", err)
	}
	m := &Mutex{cfg: cfg, locks: map[string]*Lock{}}
	switch d := d.(type) {
	case *TableDriver:
		m.d = d
	case *AdvisoryDriver:
		m.d = d
	case ours:
		m.d = &foreign{MutexDriver: d.(MutexDriver), ours: d}
	default:
		m.d = &foreign{MutexDriver: d, ours: theirs{}}
	}
	d.OnLost(m.lost)
	return m, nil
}

// complete fills in the defaults and validates cfg.
func (cfg *MutexConfig) complete() error {
	cfg.TTL = cmp.Or(cfg.TTL, 30*time.Second)
	cfg.Renew = cmp.Or(cfg.Renew, cfg.TTL/3)
	cfg.Margin = cmp.Or(cfg.Margin, cfg.TTL/10)
	cfg.RetryMin = cmp.Or(cfg.RetryMin, 10*time.Millisecond)
	cfg.RetryMax = cmp.Or(cfg.RetryMax, max(100*time.Millisecond, cfg.RetryMin))
	switch {
	case cfg.Renew <= 0 || cfg.Renew > cfg.TTL/2:
		return cmp.Or(checkTTL(cfg.TTL), invalid("Renew %s is not between 0 and half of TTL %s", cfg.Renew, cfg.TTL))
	case cfg.Margin < 0 || cfg.Margin >= cfg.TTL-cfg.Renew:
		return cmp.Or(checkTTL(cfg.TTL), invalid("Margin %s leaves no time to renew: TTL %s, Renew %s", cfg.Margin, cfg.TTL, cfg.Renew))
	case cfg.RetryMin < 0 || cfg.RetryMax < cfg.RetryMin:
		return invalid("RetryMin %s and RetryMax %s are not in order", cfg.RetryMin, cfg.RetryMax)
	}
	return checkTTL(cfg.TTL)
}

// TryLock takes the lock if it is free, and returns an [ErrHeld] if not, also if
// another caller of this process has it or waits for it. It may wait, as long as ctx
// allows, for the database's answer to another caller of this process, and for a
// transaction that a former holder has guarded.
func (m *Mutex) TryLock(ctx context.Context, name string) (lock *Lock, err error) {
	if err := m.check(ctx, name); err != nil {
		return nil, err
	}
	ctx, done, err := m.d.admit(ctx)
	if err != nil {
		return nil, wrap("lock "+name, err)
	}
	defer done()
	p, err := m.d.queue().try(ctx, m.d.queueName(name))
	switch {
	case err != nil:
		return nil, waited(ctx, "lock "+name, m.busy(name), nil)
	case p == nil:
		return nil, m.busy(name)
	}
	defer func() { m.leaveUnless(lock, err, p, name) }()
	return m.try(ctx, name, p)
}

// Lock takes the lock, and waits for it if it is held. If ctx ends the wait, see
// [ErrAcquireTimeout]; nothing stays locked then.
//
// The context bounds the acquisition only, not how long the lock is held.
func (m *Mutex) Lock(ctx context.Context, name string) (lock *Lock, err error) {
	if err := m.check(ctx, name); err != nil {
		return nil, err
	}
	ctx, done, err := m.d.admit(ctx)
	if err != nil {
		return nil, wrap("lock "+name, err)
	}
	defer done()
	q, key := m.d.queue(), m.d.queueName(name)
	p := q.join(key)
	defer func() { m.leaveUnless(lock, err, p, name) }()
	return contend(ctx, "lock "+name, q, p, m.busy(name), m.cfg.RetryMin, m.cfg.RetryMax, func() (*Lock, string, error) {
		lock, err := m.try(ctx, name, p)
		return lock, key, err
	})
}

// leaveUnless leaves the queue, unless there is a lock, which then has the place.
func (m *Mutex) leaveUnless(lock *Lock, err error, p *place, name string) {
	if lock == nil { // Also if the driver panics.
		m.d.queue().leaveAfter(err, p, m.d.queueName(name))
	}
}

func (m *Mutex) leave(p *place, name string) { m.d.queue().leave(p, m.d.queueName(name)) }

// busy is the error of a caller that is refused, or waits, because of another caller of
// this process.
func (m *Mutex) busy(name string) error {
	return &HeldError{What: mutexName(name), Owner: m.d.owner()}
}

// Do calls fn while it holds the lock, waiting for it as Lock does, and returns
// what fn returns. fn's context ends with the cause [ErrLost] if the lock is lost
// under it; Do returns an ErrLost then even if fn returned nil. The lock is given
// up even if fn panics.
func (m *Mutex) Do(ctx context.Context, name string, fn func(ctx context.Context, lock *Lock) error) (err error) {
	lock, err := m.Lock(ctx, name)
	if err != nil {
		return err
	}
	defer func() {
		if unlock := lock.Unlock(ctx); unlock != nil {
			err = errors.Join(err, unlock)
		}
	}()
	under, cancel := lock.Context(ctx)
	defer cancel()
	return fn(under, lock)
}

func (m *Mutex) check(ctx context.Context, name string) error {
	if err := checkText("name", name); err != nil {
		return wrap("lock", err)
	}
	if ctx.Err() != nil {
		return wrap("lock "+name, ended(ctx))
	}
	return nil
}

// try asks the driver once, for the caller whose turn it is.
func (m *Mutex) try(ctx context.Context, name string, p *place) (_ *Lock, err error) {
	l := &Lock{m: m, name: name, place: p, hold: newHold()}
	m.mu.Lock()
	m.locks[name] = l // So that a loss is not missed between the grant and the answer.
	m.mu.Unlock()
	defer func() {
		if l.keeper == nil { // Also if the driver panics.
			m.forget(l)
		}
	}()
	l.driver, err = m.d.take(ctx, name, m.cfg.TTL)
	if err != nil {
		return nil, err
	}
	m.d.queue().answer(p)
	l.keeper = m.d.keep(l.driver, l.hold, m.cfg)
	l.ended = context.AfterFunc(l.ctx, func() { m.drop(l) }) // Nobody waits for the Unlock of what is lost.
	return l, nil
}

// forget makes a lock unknown to losses.
func (m *Mutex) forget(l *Lock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.locks[l.name] == l {
		delete(m.locks, l.name)
	}
}

// drop forgets a lock that is not held any more, and lets the next caller come.
func (m *Mutex) drop(l *Lock) {
	m.forget(l)
	m.leave(l.place, l.name)
}

// lost is told by the driver that what held these locks has ended.
func (m *Mutex) lost(names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range names {
		if l := m.locks[name]; l != nil {
			l.end(ErrLost)
		}
	}
}

// Lock is a lock that is held until Unlock, or until it is lost. Its methods are
// safe for concurrent use.
type Lock struct {
	hold
	m      *Mutex
	name   string
	driver DriverLock
	place  *place
	keeper *keeper
	ended  func() bool // keeps the end of the hold from letting others through
	unlock sync.Once
	result error // of the first Unlock
}

// Name is the name that is locked.
func (l *Lock) Name() string { return l.name }

// Fence is the fencing token: larger than that of every earlier lock of this name,
// and 0 in advisory mode, which has none.
func (l *Lock) Fence() int64 { return l.driver.Fence }

// Done is closed when the lock is lost or unlocked. In table mode that is before
// anyone else can have it, unless this process was suspended: see [Lock.Guard]. In
// advisory mode the loss of the session is noticed within Renew and
// [Config.Timeout], and others may be faster.
func (l *Lock) Done() <-chan struct{} { return l.ctx.Done() }

// Err is nil while the lock is held and after Unlock, and [ErrLost] once it is
// lost.
func (l *Lock) Err() error { return l.err() }

// Context is a child of parent that also ends when the lock is lost, with the
// cause [ErrLost], or unlocked.
func (l *Lock) Context(parent context.Context) (context.Context, context.CancelFunc) {
	return l.context(parent)
}

// Unlock gives the lock up and returns [ErrLost] if it was lost before. It goes
// through even if ctx has ended, and takes at most [Config.Timeout]: until then it is
// repeated if the connection breaks. If it fails, the lock is left to its TTL. Further
// calls return what the first did.
func (l *Lock) Unlock(ctx context.Context) error {
	l.unlock.Do(func() {
		l.ended() // Others come after the release.
		lost := l.keeper.stop()
		defer l.m.drop(l)
		l.result = wrap("unlock "+l.name, errors.New("the driver panicked")) // Unless it returns.
		released, err := l.m.d.Release(ctx, l.driver)                        // Lost by our clock it may still be there, in the way of others.
		if lost != nil || err == nil && !released {
			err = wrap("unlock "+l.name, ErrLost)
		}
		l.result = err
	})
	return l.result
}

// Guard checks inside the caller's transaction that the lock is still held at its
// token, and keeps it so until tx ends: see [LeaseStore.Guard]. In advisory mode it is
// [errors.ErrUnsupported].
func (l *Lock) Guard(ctx context.Context, tx DBTX) error {
	return wrap("guard "+mutexName(l.name), l.m.d.guard(ctx, tx, l.driver))
}

func mutexName(name string) string { return "mutex " + name }

// listeners are those of a driver's OnLost.
type listeners struct {
	mu  sync.Mutex
	all []func([]string)
}

func (l *listeners) add(fn func([]string)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, fn)
}

func (l *listeners) tell(names []string) {
	if len(names) == 0 {
		return
	}
	slices.Sort(names)
	l.mu.Lock()
	all := slices.Clone(l.all)
	l.mu.Unlock()
	for _, fn := range all {
		fn(slices.Clone(names))
	}
}
