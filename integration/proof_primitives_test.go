package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-4c80c132/coord"
)

// primitives are what a proof is about. To prove another one, add it here.
var primitives = []primitive{
	{name: "lease", actor: leaseActor},
	{name: "mutex", actor: mutexActor},
	{name: "id set", actor: eidActor},
	{name: "reservation", actor: reservationActor, lasting: true},
}

// primitive is one way to hold something.
type primitive struct {
	name string
	// actor returns one that holds things in the name of owner, for ttl at a time.
	actor func(c *coord.Coord, db *sql.DB, owner string, ttl time.Duration) (actor, error)
	// lasting is what has no end of its own: the next process goes on with it in the
	// same name.
	lasting bool
}

// actor acquires. Only one goroutine uses it.
type actor interface {
	// acquire asks for key once. An ErrHeld: another has it.
	acquire(ctx context.Context, key string) (held, error)
}

// held is what an actor has acquired.
type held interface {
	// token is the fencing token, 0 if there is none. What has none but can be guarded
	// draws a number of its own once it is held: SELECT nextval('proof_tenure').
	token() int64
	// until is how long the holder may trust it if nothing more is heard; zero: for
	// ever.
	until() time.Time
	// renew is called every third of the TTL. ErrLost: it is not held any more. What
	// renews itself does nothing.
	renew(ctx context.Context) error
	// guard makes sure in tx that it is held until tx ends, and returns what the log
	// calls that.
	guard(ctx context.Context, tx *sql.Tx) (what string, err error)
	// committed is told that the guarded transaction was.
	committed()
	release(ctx context.Context, db *sql.DB) error
	// lost is closed when it is lost; nil if the holder has to find out.
	lost() <-chan struct{}
}

// proofGroup is the group of the leases, in which keys are partitions.
const proofGroup = "proof"

type leaseHolder struct {
	s     *coord.LeaseStore
	owner string
	ttl   time.Duration
	lease coord.Lease
}

func leaseActor(c *coord.Coord, _ *sql.DB, owner string, ttl time.Duration) (actor, error) {
	return &leaseHolder{s: c.Leases(), owner: owner, ttl: ttl}, nil
}

func (l *leaseHolder) acquire(ctx context.Context, key string) (held, error) {
	var partition int
	if _, err := fmt.Sscanf(key, "k%d", &partition); err != nil {
		return nil, err
	}
	lease, err := l.s.Acquire(ctx, proofGroup, partition, l.owner, l.ttl)
	if err != nil {
		return nil, err
	}
	return &leaseHolder{l.s, l.owner, l.ttl, lease}, nil
}

func (l *leaseHolder) token() int64     { return l.lease.Epoch }
func (l *leaseHolder) until() time.Time { return l.lease.Deadline }

func (l *leaseHolder) renew(ctx context.Context) error {
	leases, err := l.s.Renew(ctx, proofGroup, []int{l.lease.Partition}, l.owner, l.ttl)
	switch {
	case err != nil:
		return err
	case len(leases) == 0 || leases[0].Epoch != l.lease.Epoch:
		return coord.ErrLost
	}
	l.lease = leases[0]
	return nil
}

func (l *leaseHolder) guard(ctx context.Context, tx *sql.Tx) (string, error) {
	return "write", l.s.Guard(ctx, tx, l.lease)
}

func (l *leaseHolder) committed()            {}
func (l *leaseHolder) lost() <-chan struct{} { return nil }

func (l *leaseHolder) release(ctx context.Context, _ *sql.DB) error {
	_, err := l.s.Release(ctx, proofGroup, l.lease.Partition, l.owner)
	return err
}

// deadlines is a driver that remembers the deadlines of its locks, which a Mutex
// keeps to itself.
type deadlines struct {
	*coord.TableDriver
	mu sync.Mutex
	of map[int64]time.Time // by fence
}

func (d *deadlines) Acquire(ctx context.Context, name string, ttl time.Duration) (coord.DriverLock, error) {
	lock, err := d.TableDriver.Acquire(ctx, name, ttl)
	if err == nil {
		d.set(lock.Fence, lock.Deadline)
	}
	return lock, err
}

func (d *deadlines) Extend(ctx context.Context, lock coord.DriverLock, ttl time.Duration) (bool, error) {
	sent := time.Now()
	ok, err := d.TableDriver.Extend(ctx, lock, ttl)
	if ok && err == nil {
		d.set(lock.Fence, sent.Add(ttl))
	}
	return ok, err
}

func (d *deadlines) set(fence int64, at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.of[fence] = at
}

func (d *deadlines) get(fence int64) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.of[fence]
}

type mutexHolder struct {
	m    *coord.Mutex
	d    *deadlines
	lock *coord.Lock
}

func mutexActor(c *coord.Coord, _ *sql.DB, _ string, ttl time.Duration) (actor, error) {
	table, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		return nil, err
	}
	d := &deadlines{TableDriver: table, of: map[int64]time.Time{}}
	m, err := coord.NewMutex(d, coord.MutexConfig{TTL: ttl})
	return &mutexHolder{m: m, d: d}, err
}

func (m *mutexHolder) acquire(ctx context.Context, key string) (held, error) {
	lock, err := m.m.TryLock(ctx, key)
	if err != nil {
		return nil, err
	}
	return &mutexHolder{m.m, m.d, lock}, nil
}

func (m *mutexHolder) token() int64                { return m.lock.Fence() }
func (m *mutexHolder) until() time.Time            { return m.d.get(m.lock.Fence()) }
func (m *mutexHolder) renew(context.Context) error { return m.lock.Err() }
func (m *mutexHolder) committed()                  {}
func (m *mutexHolder) lost() <-chan struct{}       { return m.lock.Done() }

func (m *mutexHolder) guard(ctx context.Context, tx *sql.Tx) (string, error) {
	return "write", m.lock.Guard(ctx, tx)
}

func (m *mutexHolder) release(ctx context.Context, _ *sql.DB) error { return m.lock.Unlock(ctx) }

// eidHolder locks a key together with an id that others want with another key.
type eidHolder struct {
	l      *coord.EIDLocker
	anchor string
	ttl    time.Duration
	ids    []string
	number int64 // of its own: the tokens of sets are not told
	sent   time.Time
	gone   <-chan struct{}
}

func eidActor(c *coord.Coord, db *sql.DB, owner string, ttl time.Duration) (actor, error) {
	l, err := c.EIDLocker(coord.EIDConfig{Owner: owner, TTL: ttl, AcquireDeadline: ttl / 4, AcquireBackoff: 5 * time.Millisecond})
	return &eidActs{l, db, owner, ttl}, err
}

type eidActs struct {
	l     *coord.EIDLocker
	db    *sql.DB
	owner string
	ttl   time.Duration
}

func (a *eidActs) acquire(ctx context.Context, key string) (held, error) {
	h := &eidHolder{l: a.l, anchor: a.owner, ttl: a.ttl, ids: []string{key, fmt.Sprint("other-", rand.IntN(3))}, sent: time.Now()}
	if err := a.l.AcquireLocks(ctx, a.owner, h.ids...); err != nil {
		return nil, err
	}
	h.gone = a.l.Lost(a.owner)
	err := a.db.QueryRowContext(ctx, "SELECT nextval('proof_tenure')").Scan(&h.number)
	if err != nil {
		a.l.ReleaseLocks(ctx, a.owner)
	}
	return h, err
}

func (h *eidHolder) token() int64          { return h.number }
func (h *eidHolder) until() time.Time      { return h.sent.Add(h.ttl) }
func (h *eidHolder) committed()            {}
func (h *eidHolder) lost() <-chan struct{} { return h.gone }

// renew acquires again what is held. An anchor that has lost it acquires afresh, which
// is not to hold it still.
func (h *eidHolder) renew(ctx context.Context) error {
	sent := time.Now()
	err := h.l.AcquireLocks(ctx, h.anchor, h.ids...)
	switch {
	case errors.Is(err, coord.ErrHeld):
		return coord.ErrLost
	case err == nil && h.l.Lost(h.anchor) != h.gone:
		h.l.ReleaseLocks(ctx, h.anchor)
		return coord.ErrLost
	case err == nil:
		h.sent = sent
	}
	return err
}

func (h *eidHolder) guard(ctx context.Context, tx *sql.Tx) (string, error) {
	return "write", h.l.Guard(ctx, tx, h.anchor)
}

func (h *eidHolder) release(ctx context.Context, _ *sql.DB) error {
	h.l.ReleaseLocks(ctx, h.anchor)
	return nil
}

// reservationHolder reserves a key, confirms it in the transaction that writes, and
// releases it in another.
type reservationHolder struct {
	s        *coord.ReservationStore
	owner    string
	ttl      time.Duration
	key      string
	version  int64
	deadline time.Time
}

var proofScope = coord.ReservationScope{Context: "proof", Aggregate: "thing"}

func reservationActor(c *coord.Coord, _ *sql.DB, owner string, ttl time.Duration) (actor, error) {
	return &reservationHolder{s: c.Reservations(), owner: owner, ttl: ttl}, nil
}

func (r *reservationHolder) ref() coord.AggregateRef { return coord.AggregateRef{ID: r.owner} }

func (r *reservationHolder) acquire(ctx context.Context, key string) (held, error) {
	h := &reservationHolder{s: r.s, owner: r.owner, ttl: r.ttl, key: key}
	return h, h.renew(ctx)
}

func (r *reservationHolder) token() int64     { return 0 }
func (r *reservationHolder) until() time.Time { return r.deadline }

// renew reserves again under the same hold. What was confirmed, perhaps by a former
// process of this owner, is so until it is released.
func (r *reservationHolder) renew(ctx context.Context) error {
	sent := time.Now()
	found, err := r.s.Reserve(ctx, proofScope, r.key, r.ref(), "hold", r.ttl)
	switch {
	case errors.Is(err, coord.ErrHeld) && !r.deadline.IsZero():
		return fmt.Errorf("%w: %w", coord.ErrLost, err)
	case err != nil:
		return err
	case found.Confirmed:
		r.deadline = time.Time{}
	default:
		r.deadline = sent.Add(r.ttl)
	}
	return nil
}

func (r *reservationHolder) guard(ctx context.Context, tx *sql.Tx) (string, error) {
	r.version = time.Now().UnixNano()
	outcome, err := r.s.WithTx(tx).Confirm(ctx, proofScope, r.key, r.ref(), r.version)
	if err == nil && outcome != coord.ConfirmedNow {
		err = fmt.Errorf("%w: %v", coord.ErrLost, outcome)
	}
	return "confirm", err
}

func (r *reservationHolder) committed()            { r.deadline = time.Time{} }
func (r *reservationHolder) lost() <-chan struct{} { return nil }

// release gives up what was confirmed in a transaction that says so in the log.
func (r *reservationHolder) release(ctx context.Context, db *sql.DB) error {
	if !r.deadline.IsZero() {
		_, err := r.s.Abandon(ctx, proofScope, r.key, r.ref(), "hold")
		return err
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	s := r.s.WithTx(tx)
	was, err := s.Release(ctx, proofScope, r.key, r.ref(), time.Now().UnixNano())
	if err == nil {
		_, err = s.Abandon(ctx, proofScope, r.key, r.ref(), "hold")
	}
	if err == nil && was {
		err = logWrite(ctx, tx, "reservation", r.key, r.owner, 0, "release")
	}
	if err != nil {
		return err
	}
	return tx.Commit()
}

// proofTables are the log that guarded transactions append to, and the numbers of
// those who have no fencing token.
const proofTables = "CREATE SEQUENCE proof_tenure; CREATE TABLE proof_log (seq bigserial PRIMARY KEY, primitive text, key text, owner text, token bigint, what text)"

func logWrite(ctx context.Context, tx *sql.Tx, primitive, key, owner string, token int64, what string) error {
	_, err := tx.ExecContext(ctx, "INSERT INTO proof_log (primitive, key, owner, token, what) VALUES ($1, $2, $3, $4, $5)", primitive, key, owner, token, what)
	return err
}
