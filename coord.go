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
// A Coord keeps one connection of the pool for renewals and heartbeats, one for each
// advisory driver, and needs another for a moment to open that.
//
// No lock is safe without a fence: a process can be stopped for longer than its
// lease lasts and not notice. Guard checks inside the caller's own transaction that
// a lease, a lock or a set of them is still held, and keeps it held until the
// transaction ends. Use it wherever what is protected lives in the same database, and
// check the fencing token where it does not.
package coord

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
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
	// Timeout bounds how long each statement, the connection it needs, and a driver that is
	// stuck are waited for. It does not bound what runs in the caller's own transaction, nor
	// how long an acquisition waits for another's transaction, which its context does; 0 is
	// 5 s.
	Timeout time.Duration
	// Logger gets failures in the background; nil is slog.Default().
	Logger *slog.Logger
}

// Coord is coordination on one database. It is safe for concurrent use. Close it
// before the *sql.DB.
type Coord struct {
	*life
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
	session      *session // carries what keeps things alive
	queue        queue    // of all names that this process acquires
	roll         roll
	attempts     atomic.Int64 // the last attempt's id
	pins         atomic.Int64 // connections that advisory drivers keep
	statements   sync.Map     // *sql.Stmt on the pool, by text
	crew         crew
	late         sync.WaitGroup // calls that were abandoned in the driver; added to while an operation is in flight

	mu     sync.Mutex
	tables []*table // that are known so far: of every primitive that the dialect supports
	locks  map[*table]*batch[heldLock]
	sets   *batch[*lockSet]
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
	c := &Coord{life: newLife(nil), crew: newCrew(), db: db, dialect: d, cfg: cfg, names: names{schema: cfg.Schema, prefix: cfg.Prefix}}
	if err := cmp.Or(c.names.validate(), c.format.load(c), c.leases.load(c), c.members.load(c), c.reservations.load(c),
		(&TableDriver{c: c}).load(c.names), c.advisory.load(c), c.eids.load(c)); err != nil {
		return nil, err
	}
	// The upper half of an attempt's id is this Coord's, the lower half counts up, so that of
	// two attempts the later one is known.
	c.attempts.Store(int64(rand.Uint32N(1<<31-1)+1) << 32)
	c.session, _ = newSession(c, c.life)
	c.sets = newBatch(c.cfg.Timeout, c.keepSets)
	return c, nil
}

// complete validates cfg and fills in the defaults.
func (cfg *Config) complete() error {
	cfg.Prefix = cmp.Or(cfg.Prefix, "coord_")
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	if cfg.Owner == "" {
		cfg.Owner = uniqueOwner()
	}
	if cfg.DDL != DDLAuto && cfg.DDL != DDLManual {
		return invalid("DDL is %d", cfg.DDL)
	}
	if cfg.Timeout < 0 {
		return invalid("Timeout is %s", cfg.Timeout)
	}
	return checkText("Owner", cfg.Owner)
}

// defaultTimeout is that of [Config.Timeout].
const defaultTimeout = 5 * time.Second

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
	c.end(func() {
		ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Timeout)
		defer cancel()
		c.busy.Wait()
		c.endParts()
		bounded(ctx, c, func() {
			c.statements.Range(func(_, stmt any) bool { stmt.(*sql.Stmt).Close(); return true })
		})
		wait(ctx, &c.late)
		close(c.crew.closed)
	})
	return nil
}

// unsupported is the error of a primitive that the dialect has no file for.
func (c *Coord) unsupported() error {
	return fmt.Errorf("dialect %s: %w", c.dialect.Name(), errors.ErrUnsupported)
}

// wrap says what was attempted.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return &failure{what, part(err)}
}

// failure is the error of an operation.
type failure struct {
	what string
	err  error
}

func (f *failure) Error() string { return "coord: " + f.what + ": " + f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// part returns the error of an operation that is part of another: "coord:" is said once.
func part(err error) error {
	if f, ok := err.(*failure); ok {
		return fmt.Errorf("%s: %w", f.what, f.err)
	}
	return err
}

const (
	maxText = 1024
	maxTTL  = 10 * 365 * 24 * time.Hour
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
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
