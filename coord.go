// Package coord gives Go programs coordination on the SQL database that they
// already run, instead of an etcd, ZooKeeper or Redis beside it.
//
// [New] takes a [*sql.DB] and a [Dialect] and makes a [Coord]; each primitive is a
// store made from it:
//
//   - [Coord.Leases]: partitions of a group, each leased to one owner for a time,
//     with an epoch that fences off former owners
//   - [Coord.Members]: which nodes of a service are alive
//   - [Coord.RunPartitions] and [Coord.RunLeader]: both put to work, so that the live
//     nodes of a service share partitions, or have one leader
//   - [Coord.Reservations]: keys that belong to one owner each, reserved by a command
//     and confirmed with its event
//   - [NewMutex]: names that one holder at a time locks, on a [Coord.TableDriver]
//     or a [Coord.AdvisoryDriver]
//   - [Coord.EIDLocker]: sets of ids that are locked together, all or none
//
// Expired means expiry <= now, and the database's clock says what now is, so
// clocks of the nodes need not agree. See [Config.Clock] for the exception.
//
// A Coord keeps one connection of the pool for leases and members, one for each
// advisory driver, and needs another for a moment to open that.
//
// No lock is safe without a fence: a process can be stopped for longer than its
// lease lasts and not notice. Guard checks inside the caller's own transaction that
// a lease, a lock or a set of them is still held, and keeps it held until the
// transaction ends. Use it wherever what is protected lives in the same database, and
// check the fencing token where it does not.
package coord

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// Errors that a caller can decide on. Those of the driver are passed on, wrapped.
var (
	// ErrHeld: someone else holds it and it has not expired. errors.As to a
	// [*HeldError] tells who, as far as known.
	ErrHeld = errors.New("held by another")
	// ErrLost: what the caller held, or claims to hold, is not held any more.
	ErrLost = errors.New("not held any more")
	// ErrAcquireTimeout: a deadline ended the wait for something that was held, be
	// it by another caller of this process. It is always joined with ErrHeld and the
	// cause. A wait that was cancelled is ErrHeld and the cause alone, and where
	// nothing was held there is the cause alone.
	ErrAcquireTimeout = errors.New("waited too long")
	// ErrSetWidened: the ids that an anchor has locked may become fewer, never more.
	ErrSetWidened = errors.New("a set of locks can't grow")
	// ErrClosed: used after Close.
	ErrClosed = errors.New("used after Close")
	// ErrFormat: the tables are of a format that this version does not know, or
	// are missing under [DDLManual].
	ErrFormat = errors.New("tables missing or of an unknown format")
	// ErrInvalid: a bad argument. The text says which. Nothing was sent. Names have
	// 1 to 1,024 bytes of valid UTF-8 without NUL, TTLs are between 1 ms and 10
	// years, partitions, versions and ages are not negative.
	ErrInvalid = errors.New("invalid argument")
)

// HeldError is an [ErrHeld] that knows the holder.
type HeldError struct {
	What      string    // what was asked for, such as "lease jobs/3"
	Owner     string    // its holder; "" if a rival won it just now and is gone again
	ExpiresAt time.Time // when its hold ends by the clock that judges it; zero if unknown, or if it does not end by itself
}

func (e *HeldError) Error() string {
	if e.Owner == "" {
		return fmt.Sprintf("coord: %s: %v", e.What, ErrHeld)
	}
	if e.ExpiresAt.IsZero() {
		return fmt.Sprintf("coord: %s: %v: %s", e.What, ErrHeld, e.Owner)
	}
	return fmt.Sprintf("coord: %s: %v: %s until %s", e.What, ErrHeld, e.Owner, e.ExpiresAt.Format(time.RFC3339Nano))
}

// Is makes a HeldError an [ErrHeld].
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// DBTX is what a statement needs of a transaction: a [*sql.Tx], or what wraps one,
// on the database of the Coord. What can begin a transaction of its own, such as a
// [*sql.DB] or a [*sql.Conn], is [ErrInvalid]; another wrapper of a pool is not
// noticed, and protects nothing.
type DBTX interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// DDL says who makes the tables.
type DDL int

const (
	DDLAuto   DDL = iota // coord makes a table on its first use
	DDLManual            // coord only checks; see [Coord.Schema]
)

// Config configures a [Coord]. Its zero value is ready to use.
type Config struct {
	// Schema is the schema of the tables, which must exist; "" is the
	// connection's own (Postgres: the first of its search_path).
	Schema string
	// Prefix is put before every table name; "" is "coord_".
	Prefix string
	// Owner names this process where a caller gives no name of its own; "" is
	// host-pid-random, unique per Coord.
	Owner string
	// Clock judges expiry in place of the database's clock if it is not nil. It
	// must then be the same clock, to well under a TTL, in every process.
	Clock func() time.Time
	// DDL is DDLAuto by default.
	DDL DDL
	// NoPrepare sends statements unprepared, as PgBouncer before 1.21 needs in
	// transaction mode.
	NoPrepare bool
	// Timeout bounds how long a statement or a stuck driver is waited for, but for
	// acquisitions of a [TableDriver] and reservations, which the caller's context
	// bounds, and for what runs in the caller's own transaction; 0 is 5 s.
	Timeout time.Duration
	// Logger gets failures in the background; nil discards them.
	Logger *slog.Logger
}

// Coord is coordination on one database. It is safe for concurrent use. Close it
// before the *sql.DB.
type Coord struct {
	db           *sql.DB
	dialect      Dialect
	cfg          Config
	names        names
	format       formatStore
	leases       LeaseStore
	members      MemberStore
	reservations ReservationStore
	advisory     advisorySQL
	eids         eidSQL
	session      *session // carries leases and members
	roll         roll
	attempts     atomic.Int64 // the last attempt's id
	prepared     sync.Map     // *sql.Stmt on the pool, by text

	life    context.Context // ends with Close
	end     context.CancelCauseFunc
	closing sync.Once
	crew    crew
	busy    sync.WaitGroup // operations and undos under way; added to under mu, until life ends
	late    sync.WaitGroup // what operations have left behind in the driver; added to while they are busy

	mu      sync.Mutex
	tables  []*table             // that are known so far: of every primitive that the dialect supports
	drivers []interface{ end() } // made from this Coord
}

// New returns a Coord on db. It does no I/O. It returns [ErrInvalid] for a
// configuration or a dialect that can't work.
func New(db *sql.DB, d Dialect, cfg Config) (*Coord, error) {
	if db == nil || d == nil {
		return nil, wrap("new", invalid("the *sql.DB or the dialect is nil"))
	}
	if err := cfg.complete(); err != nil {
		return nil, wrap("new", err)
	}
	c := &Coord{db: db, dialect: d, cfg: cfg, names: names{schema: cfg.Schema, prefix: cfg.Prefix}}
	if err := first(c.names.validate(), c.format.load(c), c.leases.load(c), c.members.load(c), c.reservations.load(c),
		(&TableDriver{c: c}).load(c.names), c.advisory.load(c), c.eids.load(c)); err != nil {
		return nil, err
	}
	c.session = newSession(c)
	c.attempts.Store(int64(rand.Uint32N(1<<31-1)+1) << 32)
	c.life, c.end = context.WithCancelCause(context.Background())
	return c, nil
}

// complete validates cfg and fills in the defaults.
func (cfg *Config) complete() error {
	if cfg.Prefix == "" {
		cfg.Prefix = "coord_"
	}
	if cfg.Owner == "" {
		cfg.Owner = uniqueOwner()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.DDL != DDLAuto && cfg.DDL != DDLManual {
		return invalid("DDL is %d", cfg.DDL)
	}
	if cfg.Timeout < 0 {
		return invalid("Timeout is %s", cfg.Timeout)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	return checkText("Owner", cfg.Owner)
}

// uniqueOwner is host-pid-random: a host name alone is no identity.
func uniqueOwner() string {
	host, err := os.Hostname()
	if err != nil || checkText("host", host) != nil {
		host = "host"
	}
	return fmt.Sprintf("%s-%d-%016x", host, os.Getpid(), rand.Uint64())
}

// Owner is the name of this process: [Config.Owner] or its default.
func (c *Coord) Owner() string { return c.cfg.Owner }

// Leases returns the store of leases.
func (c *Coord) Leases() *LeaseStore { return &c.leases }

// Members returns the store of members.
func (c *Coord) Members() *MemberStore { return &c.members }

// Reservations returns the store of reservations.
func (c *Coord) Reservations() *ReservationStore { return &c.reservations }

// Close ends everything that was made from c and gives its connections back to
// the pool; it does not close the *sql.DB. Sets of ids are released, in at most 5 s.
// Leases, members and table mutexes are not: they stay until their TTL. Operations
// under way end, those that wait with [ErrClosed]; it takes no longer than a few times
// [Config.Timeout]. It returns nil and may be called again.
func (c *Coord) Close() error {
	c.closing.Do(func() {
		c.mu.Lock()
		c.end(ErrClosed)
		drivers := slices.Clone(c.drivers) // No more come.
		c.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Timeout)
		defer cancel()
		c.busy.Wait()
		var parts sync.WaitGroup
		parts.Go(c.session.close)
		for _, d := range drivers {
			parts.Go(d.end)
		}
		parts.Wait()
		bounded(ctx, c, func() {
			c.prepared.Range(func(_, stmt any) bool { stmt.(*sql.Stmt).Close(); return true })
		})
		wait(ctx, &c.late)
		c.crew.close()
	})
	return nil
}

// wait waits for a group until ctx ends.
func wait(ctx context.Context, group *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { group.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// releasing marks the context of a release.
type releasing struct{}

// begin admits one operation: not after Close, and not on a context that has
// ended. The context it returns also ends when Close is called, unless it is a
// release's; done must be called at the end.
func (c *Coord) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.Err() != nil {
		return nil, nil, ErrClosed
	}
	if ctx.Err() != nil {
		return nil, nil, ended(ctx)
	}
	if c.cfg.Clock != nil && c.cfg.Clock().UnixMicro() < 0 {
		return nil, nil, invalid("Config.Clock is before 1970, which marks what is released")
	}
	c.busy.Add(1)
	if ctx.Value(releasing{}) != nil {
		return ctx, c.busy.Done, nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.life, func() { cancel(ErrClosed) })
	return ctx, func() { stop(); cancel(nil); c.busy.Done() }, nil
}

// detach is the context of a release: it goes through whatever becomes of ctx, for
// no longer than [Config.Timeout].
func (c *Coord) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithValue(context.WithoutCancel(ctx), releasing{}, true), c.cfg.Timeout)
}

// unsupported is the error of a primitive that the dialect has no file for.
func (c *Coord) unsupported() error {
	return fmt.Errorf("dialect %s: %w", c.dialect.Name(), errors.ErrUnsupported)
}

// disown forgets a driver that has ended.
func (c *Coord) disown(d interface{ end() }) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drivers = slices.DeleteFunc(c.drivers, func(known interface{ end() }) bool { return known == d })
}

// own makes Close end d too.
func (c *Coord) own(d interface{ end() }) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.Err() != nil {
		return ErrClosed
	}
	c.drivers = append(c.drivers, d)
	return nil
}

// wrap says what was attempted.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("coord: %s: %w", what, err)
}

const (
	maxText = 1024
	maxTTL  = 10 * 365 * 24 * time.Hour
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// first returns the first error that is not nil.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// checkText refuses text that is empty or that checkOptional refuses.
func checkText(name, text string) error {
	if text == "" {
		return invalid("%s is empty", name)
	}
	return checkOptional(name, text)
}

// checkOptional refuses text that a database can't keep as it is.
func checkOptional(name, text string) error {
	switch {
	case len(text) > maxText:
		return invalid("%s has %d bytes, over %d", name, len(text), maxText)
	case !utf8.ValidString(text):
		return invalid("%s is not valid UTF-8", name)
	case strings.ContainsRune(text, 0):
		return invalid("%s holds a NUL", name)
	}
	return nil
}

// checkTx refuses what is no transaction but can begin one, as a *sql.DB, a
// *sql.Conn and what embeds them can: a guard would end with its statement.
func checkTx(tx DBTX) error {
	if tx == nil || tx == DBTX((*sql.Tx)(nil)) {
		return invalid("tx is nil")
	}
	if _, pool := tx.(interface {
		BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
	}); pool {
		return invalid("tx is a %T, not a transaction", tx)
	}
	return nil
}

func checkTTL(ttl time.Duration) error {
	if ttl < time.Millisecond || ttl > maxTTL {
		return invalid("ttl %s is not between %s and %s", ttl, time.Millisecond, maxTTL)
	}
	return nil
}
