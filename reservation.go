package coord

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// ReservationScope is where a key is unique: in a tenant's namespace of one type
// of reservations. The type is an aggregate of a bounded context, and has a table
// of its own. Context and Aggregate are lower-case ASCII letters, digits and single
// underscores between them, and do not start with a digit; Tenant and Namespace may
// be empty.
type ReservationScope struct{ Context, Aggregate, Tenant, Namespace string }

// AggregateRef is the owner of a key. Tenant may be empty.
type AggregateRef struct{ Tenant, ID string }

// Reservation is a key and the owner that it belongs to: pending, until its last
// hold expires, or confirmed, until it is released.
type Reservation struct {
	Scope     ReservationScope
	Key       string
	Owner     AggregateRef
	Confirmed bool
	Version   int64    // that it is confirmed at; 0 while it is pending
	Holds     []string // that have not expired, in byte order, never nil
	// ExpiresAt is when the last of Holds expires, by the clock that judges it, see
	// [Config.Clock], and with it what is not confirmed. It is zero without Holds.
	ExpiresAt time.Time
}

// ConfirmOutcome is how a [ReservationStore.Confirm] ended.
type ConfirmOutcome int

const (
	ConfirmedNow    ConfirmOutcome = iota + 1 // the key is the owner's, at the version that was given
	ConfirmedBefore                           // it had been confirmed at that version or a later one, which stays
	ConfirmStale                              // the owner has released it at that version or a later one: nothing changed
	ConfirmTaken                              // it is another's: nothing changed
)

func (o ConfirmOutcome) String() string {
	switch o {
	case ConfirmedNow:
		return "confirmed now"
	case ConfirmedBefore:
		return "confirmed before"
	case ConfirmStale:
		return "stale"
	case ConfirmTaken:
		return "taken"
	}
	return fmt.Sprintf("ConfirmOutcome(%d)", int(o))
}

// ReservationStore reserves keys for owners: a user name, say, belongs to at most
// one user. A command reserves the key, under a hold, which is the id of that
// attempt; when the command's event is stored, the key is confirmed at the event's
// version; a later event releases it at its own version; a command that fails
// abandons its hold.
//
// Confirm and Release may be sent again, in any order and however late: a version
// that has been processed changes nothing. The store remembers, for each owner of
// a key, the version of its last release until [Coord.Purge].
//
// Its methods are safe for concurrent use and run on the connections of the pool,
// or in the caller's transaction, see WithTx.
type ReservationStore struct {
	c     *Coord
	types *reservationTypes
	tx    DBTX
	bound bool // to tx
}

// reservationTypes are the types that are known so far.
type reservationTypes struct {
	supported bool // by the dialect

	mu     sync.Mutex
	byName map[[2]string]*reservationType // by context and aggregate
}

// reservationType is one type's table, nil if the dialect has no reservations, and
// its statements.
type reservationType struct {
	table *table

	reserve string // (tenant, namespace, key, owner's tenant, owner's id, hold, ttl, now, attempt, bounded) row of (granted, owner's tenant, owner's id, confirmed, version, holds json, expires), or none
	undo    string // (tenant, namespace, key, attempt) changes the row of that attempt
	confirm string // (tenant, namespace, key, owner's tenant, owner's id, version, now) row of (outcome), or none
	refusal string // (tenant, namespace, key, owner's tenant, owner's id, version, now) row of (outcome, 0 if it is not refused), or none
	abandon string // (tenant, namespace, key, owner's tenant, owner's id, hold) row, or none
	release string // (tenant, namespace, key, owner's tenant, owner's id, version, now) row, or none
	find    string // (tenant, namespace, key, now) row of (owner's tenant, owner's id, confirmed, version, holds json, expires or 0), or none
	purge   string // (age, now) changes as many rows as it deletes
	trim    string // (age, now) forgets releases of keys that stay
}

// defaultReservation is the table's name in the files.
const defaultReservation = "coord_reservation__context__aggregate"

// load validates the dialect's file. Every type loads it under a name of its own.
func (s *ReservationStore) load(c *Coord) error {
	s.c, s.types = c, &reservationTypes{byName: map[[2]string]*reservationType{}}
	n := c.names
	n.from, n.toSchema, n.to = defaultReservation, n.schema, "x" // A long prefix fits some types, or none.
	_, ok, err := new(reservationType).load(c.dialect, n)
	s.types.supported = ok
	return err
}

func (t *reservationType) load(d Dialect, n names) (ddl string, ok bool, err error) {
	return load(d, n, "reservation.sql",
		section{"reserve", &t.reserve}, section{"undo", &t.undo}, section{"confirm", &t.confirm}, section{"refusal", &t.refusal},
		section{"abandon", &t.abandon}, section{"release", &t.release}, section{"find", &t.find}, section{"purge", &t.purge}, section{"trim", &t.trim})
}

// of returns a type of reservations by its context and aggregate. It does no I/O.
func (s *ReservationStore) of(context, aggregate string) (*reservationType, error) {
	s.types.mu.Lock()
	defer s.types.mu.Unlock()
	name := [2]string{context, aggregate}
	if t := s.types.byName[name]; t != nil {
		return t, nil
	}
	n := s.c.names
	n.from, n.toSchema, n.to = defaultReservation, n.schema, reservationPrefix(n)+context+"__"+aggregate
	if err := cmp.Or(checkTypeName("context", context), checkTypeName("aggregate", aggregate), checkIdentifier("table name", n.to)); err != nil {
		return nil, err
	}
	t := &reservationType{}
	ddl, ok, err := t.load(s.c.dialect, n)
	if err != nil {
		return nil, err
	}
	if ok {
		t.table, err = s.c.newTable(n, defaultReservation, ddl, t.purge, t.trim, t.reserve, t.confirm, t.refusal, t.abandon, t.release, t.find)
		if err != nil {
			return nil, err
		}
	}
	s.types.byName[name] = t
	return t, nil
}

// reservationPrefix is what the names of all types' tables start with.
func reservationPrefix(n names) string { return n.prefix + "reservation__" }

// discover makes the types known whose tables are recorded: other processes may
// have made them.
func (s *ReservationStore) discover(ctx context.Context) error {
	if !s.types.supported {
		return nil
	}
	formats, err := s.c.format.recorded(ctx)
	if err != nil {
		return err
	}
	for record := range formats {
		name, ours := strings.CutPrefix(record, reservationPrefix(s.c.names))
		context, aggregate, typed := strings.Cut(name, "__")
		if !ours || !typed || checkTypeName("context", context) != nil || checkTypeName("aggregate", aggregate) != nil {
			continue
		}
		if _, err := s.of(context, aggregate); err != nil {
			return err
		}
	}
	return nil
}

// WithTx returns the same operations inside the caller's transaction, so that a
// key is confirmed together with the event that claims it. They go by the caller's
// context, and a transaction that is rolled back takes them back; after an error
// of the database, roll back. A key that is reserved in a transaction makes its
// rivals wait until that ends. Under REPEATABLE READ and above, a serialization
// failure (40001) means: run the transaction again.
//
// The table of a type is never made in tx, but beside it, on the pool. On SQLite
// or with a pool limited to one connection that can't be: there a type without a
// table is [ErrFormat] until [Coord.Migrate] has made it.
//
// A *sql.DB is [ErrInvalid] when it is used.
func (s *ReservationStore) WithTx(tx DBTX) *ReservationStore {
	return &ReservationStore{c: s.c, types: s.types, tx: tx, bound: true}
}

// Reserve reserves key for owner under a hold that lasts for ttl. A key that is the
// owner's already, pending or confirmed, gets one more hold; the same hold again
// lasts for ttl from now if that is longer. It returns an [ErrHeld], as a
// [*HeldError] whose Owner reads "tenant/id", if the key is another owner's. It may
// wait for another transaction that has the key, until ctx ends.
//
// If the reply is lost the caller gets the driver's error, and what may have been
// added is removed in the background: the hold, unless another Reserve has asked
// for the same one.
func (s *ReservationStore) Reserve(ctx context.Context, scope ReservationScope, key string,
	owner AggregateRef, hold string, ttl time.Duration) (Reservation, error) {
	t, err := s.check(scope, key, owner)
	if err := cmp.Or(err, checkText("hold", hold), checkTTL(ttl)); err != nil {
		return Reservation{}, wrap("reserve", err)
	}
	try := func(ctx context.Context, on conn, attempt int64) (Reservation, *HeldError, error) {
		return s.try(ctx, on, t, scope, key, owner, hold, ttl, attempt)
	}
	what := reservationName(scope, key)
	var got Reservation
	var held *HeldError
	if s.bound {
		if err = s.c.readyIn(ctx, s.tx, t.table); err == nil {
			got, held, err = try(ctx, s.c.within(s.tx), s.c.attempts.Add(1))
		}
	} else {
		got, held, err = acquireInTurn(ctx, s.c, acquisition[Reservation]{what: what, table: t.table, try: try,
			undo: func(ctx context.Context, on conn, attempt int64) (bool, error) {
				n, err := on.exec(ctx, t.undo, scope.Tenant, scope.Namespace, key, attempt)
				return n > 0, err
			}})
	}
	return granted("reserve "+what, got, held, err)
}

// try sends the reservation. On engines that can't name the owner in the same statement,
// and when a rival was faster, it reads who it is.
func (s *ReservationStore) try(ctx context.Context, on conn, t *reservationType,
	scope ReservationScope, key string, owner AggregateRef, hold string, ttl time.Duration, attempt int64) (got Reservation, held *HeldError, err error) {
	found := foundReservation{scope: scope, key: key}
	for range maxRivals {
		wasGranted := false
		args := []any{scope.Tenant, scope.Namespace, key, owner.Tenant, owner.ID, hold, micros(ttl), s.c.now(), attempt, !s.bound}
		answered, err := on.row(ctx, t.reserve, args, append([]any{&wasGranted}, found.fields()...)...)
		if err == nil && !answered {
			answered, err = on.row(ctx, t.find, []any{scope.Tenant, scope.Namespace, key, s.c.now()}, found.fields()...)
		}
		switch {
		case err != nil:
			return got, nil, err
		case wasGranted:
			got, err = found.reservation()
			return got, nil, err
		case !answered:
			return got, &HeldError{What: reservationName(scope, key)}, nil // The rival is gone again.
		case found.owner != owner:
			return got, found.held(), nil
		}
		// A rival had it, and now it is the owner's.
	}
	return got, &HeldError{What: reservationName(scope, key)}, nil
}

// maxRivals bounds how often a statement is sent again because a rival was faster.
const maxRivals = 10

// Confirm makes key the owner's at version, which is that of the event that claims
// it, whether it was reserved, is free or another's reservation has expired, and
// ends its holds. See [ConfirmOutcome] for what else it may find; those are no
// errors. It may be sent again.
func (s *ReservationStore) Confirm(ctx context.Context, scope ReservationScope, key string,
	owner AggregateRef, version int64) (ConfirmOutcome, error) {
	t, err := s.check(scope, key, owner)
	if err := cmp.Or(err, checkVersion(version)); err != nil {
		return 0, wrap("confirm", err)
	}
	outcome, err := onKey(ctx, s, t, scope, key, func(ctx context.Context, on conn) (ConfirmOutcome, error) {
		return s.tryConfirm(ctx, on, t, scope, key, owner, version)
	})
	return outcome, wrap("confirm "+reservationName(scope, key), err)
}

// tryConfirm sends the confirmation. On engines that can't tell why in the same
// statement, and when a rival was faster, it reads what refused it.
func (s *ReservationStore) tryConfirm(ctx context.Context, on conn, t *reservationType,
	scope ReservationScope, key string, owner AggregateRef, version int64) (ConfirmOutcome, error) {
	var outcome int64
	for range maxRivals {
		for _, text := range []string{t.confirm, t.refusal} {
			args := []any{scope.Tenant, scope.Namespace, key, owner.Tenant, owner.ID, version, s.c.now()}
			if _, err := on.row(ctx, text, args, &outcome); err != nil || outcome > 0 {
				return ConfirmOutcome(outcome), err
			}
		}
	}
	return 0, fmt.Errorf("rivals were faster %d times", maxRivals)
}

// Abandon ends a hold, as the command that failed does, and frees the key if it was
// the last one and the key is not confirmed. It reports whether the hold was there,
// expired or not. Outside a transaction it runs even if ctx has ended, for at most
// [Config.Timeout], and is repeated if the connection breaks: false may then mean that the
// first statement has ended the hold.
func (s *ReservationStore) Abandon(ctx context.Context, scope ReservationScope, key string,
	owner AggregateRef, hold string) (bool, error) {
	t, err := s.check(scope, key, owner)
	if err := cmp.Or(err, checkText("hold", hold)); err != nil {
		return false, wrap("abandon", err)
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	was, err := onKey(ctx, s, t, scope, key, func(ctx context.Context, on conn) (was bool, err error) {
		_, err = on.row(ctx, t.abandon, []any{scope.Tenant, scope.Namespace, key, owner.Tenant, owner.ID, hold}, &was)
		return was, err
	})
	return was, wrap("abandon "+reservationName(scope, key), err)
}

// Release ends the confirmation of key at version, which is that of the event that
// gives it up, if it is the owner's at that version or an earlier one, and tells
// whether it was. The key is free then, or pending if it has holds that have not
// expired. It may be sent again. Outside a transaction it runs even if ctx has
// ended, for at most [Config.Timeout], and is repeated if the connection breaks: false may
// then mean that the first statement has released the key.
func (s *ReservationStore) Release(ctx context.Context, scope ReservationScope, key string,
	owner AggregateRef, version int64) (bool, error) {
	t, err := s.check(scope, key, owner)
	if err := cmp.Or(err, checkVersion(version)); err != nil {
		return false, wrap("release reservation", err)
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	was, err := onKey(ctx, s, t, scope, key, func(ctx context.Context, on conn) (was bool, err error) {
		_, err = on.row(ctx, t.release, []any{scope.Tenant, scope.Namespace, key, owner.Tenant, owner.ID, version, s.c.now()}, &was)
		return was, err
	})
	return was, wrap("release "+reservationName(scope, key), err)
}

// Find returns whose key is, and false if it is free.
func (s *ReservationStore) Find(ctx context.Context, scope ReservationScope, key string) (Reservation, bool, error) {
	t, err := s.check(scope, key, AggregateRef{ID: "anyone"})
	if err != nil {
		return Reservation{}, false, wrap("find reservation", err)
	}
	type answer struct {
		reservation Reservation
		found       bool
	}
	got, err := run(ctx, s.c, where{tx: s.tx}, t.table, func(ctx context.Context, on conn) (answer, error) {
		row := foundReservation{scope: scope, key: key}
		found, err := on.row(ctx, t.find, []any{scope.Tenant, scope.Namespace, key, s.c.now()}, row.fields()...)
		if err != nil || !found {
			return answer{}, err
		}
		r, err := row.reservation()
		return answer{r, err == nil}, err
	})
	return got.reservation, got.found, wrap("find "+reservationName(scope, key), err)
}

// onKey runs an operation that changes a key: in the caller's transaction, if there is one,
// or on the pool when no other caller of this process is at work on the key.
func onKey[T any](ctx context.Context, s *ReservationStore, t *reservationType,
	scope ReservationScope, key string, do func(context.Context, conn) (T, error)) (result T, err error) {
	if !s.bound && t.table != nil {
		turn, cancel := context.WithTimeout(ctx, s.c.cfg.Timeout)
		defer cancel()
		name := t.table.record + " " + reservationName(scope, key)
		p, err := s.c.queue.wait(turn, name)
		if err != nil {
			return result, fmt.Errorf("wait for another caller of this process: %w", err)
		}
		defer s.c.queue.leave(p, name)
	}
	return run(ctx, s.c, where{tx: s.tx}, t.table, do)
}

// detach is [Coord.detach], but in the caller's transaction it goes by ctx.
func (s *ReservationStore) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.bound {
		return ctx, func() {}
	}
	return s.c.detach(ctx)
}

// foundReservation is a row as it is read.
type foundReservation struct {
	scope     ReservationScope
	key       string
	owner     AggregateRef
	confirmed bool
	version   int64
	holds     string
	expires   int64
}

func (f *foundReservation) fields() []any {
	return []any{&f.owner.Tenant, &f.owner.ID, &f.confirmed, &f.version, &f.holds, &f.expires}
}

func (f *foundReservation) reservation() (Reservation, error) {
	r := Reservation{Scope: f.scope, Key: f.key, Owner: f.owner, Confirmed: f.confirmed, Version: f.version}
	if f.expires > 0 {
		r.ExpiresAt = time.UnixMicro(f.expires)
	}
	err := json.Unmarshal([]byte(f.holds), &r.Holds)
	slices.Sort(r.Holds)
	return r, err
}

// held is the refusal of another owner. What is confirmed has no end.
func (f *foundReservation) held() *HeldError {
	held := &HeldError{What: reservationName(f.scope, f.key), Owner: f.owner.Tenant + "/" + f.owner.ID}
	if !f.confirmed {
		held.ExpiresAt = time.UnixMicro(f.expires)
	}
	return held
}

// check returns the type of a scope, if the arguments that all operations have are
// good.
func (s *ReservationStore) check(scope ReservationScope, key string, owner AggregateRef) (*reservationType, error) {
	if s.bound {
		if err := checkTx(s.tx); err != nil {
			return nil, err
		}
	}
	if err := cmp.Or(checkOptional("tenant", scope.Tenant), checkOptional("namespace", scope.Namespace), checkText("key", key),
		checkOptional("owner's tenant", owner.Tenant), checkText("owner's id", owner.ID)); err != nil {
		return nil, err
	}
	// Postgres can't index more, and would say so only when it is stored.
	if n := len(scope.Tenant) + len(scope.Namespace) + len(key); n > maxKey {
		return nil, invalid("tenant, namespace and key have %d bytes together, over %d", n, maxKey)
	}
	return s.of(scope.Context, scope.Aggregate)
}

const maxKey = 2600

// typeName leaves "__" to stand between two names, so that two types never share
// a table.
var typeName = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

func checkTypeName(what, name string) error {
	if !typeName.MatchString(name) {
		return invalid("%s %q is not of lower-case letters, digits and single underscores between them", what, name)
	}
	return nil
}

func checkVersion(version int64) error {
	if version < 0 {
		return invalid("version %d is negative", version)
	}
	return nil
}

func reservationName(scope ReservationScope, key string) string {
	return fmt.Sprintf("reservation %s/%s %s/%s/%s", scope.Context, scope.Aggregate, scope.Tenant, scope.Namespace, key)
}
