package coord

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// knownFormat is the format of every table that this version makes and reads.
const knownFormat = 1

// table is one table of a primitive: what makes it, and whether it has been seen.
type table struct {
	base   string // its default name
	schema string
	name   string
	record string // its name in the format records
	ddl    string
	guards []string    // statements that run inside callers' transactions
	purge  string      // (age, now) deletes a batch of what expired longer than age ago; "" if nothing may go
	trim   string      // (age, now) forgets what is older than age in a batch of the rows that stay; "" if nothing
	ready  atomic.Bool // seen on the pool, in the known format

	use     *firstUse // in progress; nil if there is none; under the Coord's mu
	noticed bool      // a look by notice is in progress; under the Coord's mu
}

// firstUse is one look for a table, which makes the table if necessary. It belongs to
// no caller: all that need the table share it, and it outlives their contexts.
type firstUse struct {
	done chan struct{} // closed at the end
	err  error         // only read after that
}

// formatStore knows which tables there are and in which format.
type formatStore struct {
	c       *Coord
	schema  string
	name    string
	ddl     string
	where   string // (schema, table) row of (the schema that has the table, or ""; the schema where it would be made)
	formats string // () rows of (table, format)

	terminate string // () ends the server's session; "" where closing the connection does
}

func (s *formatStore) load(c *Coord) error {
	ddl, ok, err := load(c.dialect, c.names, "format.sql", section{"where", &s.where}, section{"formats", &s.formats}, section{"terminate?", &s.terminate})
	if err == nil && !ok {
		err = fmt.Errorf("coord: dialect %s: %w", c.dialect.Name(), invalid("format.sql is missing"))
	}
	s.c, s.ddl = c, ddl
	s.schema, s.name = c.names.table("coord_format")
	return err
}

// Migrate makes the tables of every primitive, with their format records, where
// they are missing. It looks first and runs no DDL where all is there; many
// processes may call it at once. Under [DDLManual] it only checks, and returns
// [ErrFormat] if a table is missing. It also returns ErrFormat, having touched
// nothing, for tables of a format that this version does not know.
//
// The tables of reservations are those of types, of whose fields only Context and
// Aggregate count, and of the types that c has used so far.
//
// Nobody has to call it: a table is made on its first use. Callers that need a table
// at the same time share its first use, and so does Migrate. Each waits for it as long
// as its own context allows, but the first use goes on without them, for at most
// [Config.Timeout]. If it fails, the next operation tries again.
func (c *Coord) Migrate(ctx context.Context, types ...ReservationScope) error {
	if err := c.know(types); err != nil {
		return wrap("migrate reservations", err)
	}
	ctx, done, err := c.begin(ctx)
	if err != nil {
		return wrap("migrate", err)
	}
	defer done()
	for _, t := range c.known() {
		if err := c.ensure(ctx, t, true); err != nil {
			rethrow(err)
			return wrap("migrate", err)
		}
	}
	return nil
}

// Schema returns the DDL and the format records as Migrate would run them where
// nothing is there yet, for people who apply them by hand, in one transaction.
func (c *Coord) Schema(types ...ReservationScope) (string, error) {
	if err := c.know(types); err != nil {
		return "", wrap("schema of reservations", err)
	}
	parts := []string{c.format.ddl}
	for _, t := range c.known() {
		parts = append(parts, t.ddl)
	}
	return strings.Join(parts, "\n\n") + "\n", nil
}

// know makes types of reservations known.
func (c *Coord) know(types []ReservationScope) error {
	for _, scope := range types {
		t, err := c.reservations.of(scope.Context, scope.Aggregate)
		if err != nil {
			return err
		}
		if t.table == nil {
			return c.unsupported()
		}
	}
	return nil
}

// Purge deletes what nobody needs any more and returns how many rows that were: those
// that expired longer than age ago, by the clock that judges expiry, and those that
// were released. It never touches a lease's epoch, and passes over tables that do not
// exist. Nothing else calls it: a table mutex leaves a row for each name that was ever
// locked.
//
// It covers every type of reservations that has a table. A key that was released
// within age stays, and a [ReservationStore.Confirm] that is older than a release
// which is gone may resurrect its key.
//
// It works in batches, so that it locks no more than 10,000 rows at a time, and for as
// long as ctx allows. A table that fails does not keep it from the others: it returns
// the errors of all tables, joined, together with the count so far.
func (c *Coord) Purge(ctx context.Context, age time.Duration) (int64, error) {
	if age < 0 {
		return 0, wrap("purge", invalid("age %s is negative", age))
	}
	ctx, done, err := c.begin(ctx)
	if err != nil {
		return 0, wrap("purge", err)
	}
	defer done()
	known := c.known()
	deleted, err := c.purgeAll(ctx, known, age)
	if err != nil && ctx.Err() != nil {
		return deleted, err
	}
	rethrow(err)
	unknown := wrap("purge reservations", c.reservations.discover(ctx))
	more, others := c.purgeAll(ctx, c.known()[len(known):], age) // What is known is only added to.
	return deleted + more, errors.Join(err, unknown, others)
}

// purgeAll purges each of the tables, but none after ctx has ended.
func (c *Coord) purgeAll(ctx context.Context, tables []*table, age time.Duration) (deleted int64, err error) {
	var failed []error
	for _, t := range tables {
		n, err := c.purge(ctx, t, age)
		deleted += n
		if err == nil {
			continue
		}
		failed = append(failed, wrap("purge "+t.name, err))
		if ctx.Err() != nil {
			break
		}
	}
	return deleted, errors.Join(failed...)
}

func (c *Coord) purge(ctx context.Context, t *table, age time.Duration) (int64, error) {
	if t.purge == "" {
		return 0, nil
	}
	if missing, err := c.missing(ctx, t); err != nil || missing {
		return 0, err
	}
	deleted, err := c.inBatches(ctx, t.purge, age)
	if err == nil && t.trim != "" {
		_, err = c.inBatches(ctx, t.trim, age)
	}
	return deleted, err
}

// inBatches sends a statement, whose text limits how many rows it changes, until it
// changes none. Only ctx bounds it: how long it takes depends on the table's size.
func (c *Coord) inBatches(ctx context.Context, text string, age time.Duration) (changed int64, err error) {
	for {
		n, err := await(ctx, c, func() (int64, error) {
			return retry(ctx, c, func() (int64, error) { return c.pool().exec(ctx, text, micros(age), c.now()) })
		}, nil)
		rethrow(err)
		changed += n
		if err != nil || n == 0 {
			return changed, err
		}
	}
}

// newTable registers the table of a file under its configured name, or returns the
// one that has been. A name that is another file's is [ErrInvalid].
func (c *Coord) newTable(n names, base, ddl, purge, trim string, guards ...string) (*table, error) {
	t := &table{base: base, record: n.value(base), ddl: ddl, purge: purge, trim: trim, guards: guards}
	t.schema, t.name = n.table(base)
	if t.record == c.format.name {
		return nil, invalid("table %s is that of the formats", t.record)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, known := range c.tables {
		switch {
		case known.record == t.record && known.base == base:
			return known, nil
		case known.record == t.record:
			return nil, invalid("table %s is that of %s", t.record, known.base)
		}
	}
	c.tables = append(c.tables, t)
	return t, nil
}

// known returns the tables that have been registered so far.
func (c *Coord) known() []*table {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.tables)
}

// ensure makes sure that t is there and in the known format. It waits for the first
// use of t, which it begins unless there is one in progress. A failure is tried again
// by the next operation. If afresh is set, it looks although t may be ready, and not only
// before the call.
func (c *Coord) ensure(ctx context.Context, t *table, afresh bool) error {
	if t == nil {
		return c.unsupported()
	}
	if t.ready.Load() && !afresh {
		return nil
	}
	for {
		use, begun := c.firstUse(t, afresh)
		if use == nil {
			return nil
		}
		err := use.wait(ctx, t)
		if begun || !afresh || err != nil && !errors.Is(err, ErrFormat) { // A database out of reach is that for everybody.
			return err
		}
	}
}

// firstUse returns the first use of t that is in progress, or begins one, and reports
// whether it has. If t is ready it returns nil, unless afresh is set. It must be called
// during an operation.
func (c *Coord) firstUse(t *table, afresh bool) (use *firstUse, begun bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.use != nil || t.ready.Load() && !afresh {
		return t.use, false
	}
	t.use = &firstUse{done: make(chan struct{})}
	c.busy.Go(func() { c.serve(t, t.use) })
	return t.use, true
}

// readyIn makes sure that t is there for a statement in the caller's transaction. It looks
// through that first, which may have made the table. What is seen there is not remembered,
// since it may be rolled back. A look on the pool remembers it: a transaction must not begin
// with a read for ever, or SQLite would not let it write after another's commit.
func (c *Coord) readyIn(ctx context.Context, tx DBTX, t *table) error {
	missing, err := "", c.over()
	if err == nil && ctx.Err() == nil && t != nil && !t.ready.Load() {
		missing, err = c.format.missing(ctx, c.within(tx), t) // Only ctx bounds it, so Close does not wait for it.
	}
	if err != nil {
		return err
	}
	ctx, done, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	switch {
	case t == nil || t.ready.Load():
		return c.ensure(ctx, t, false)
	case missing == "":
		c.notice(t)
		return nil
	case !c.beside():
		return fmt.Errorf("%w: %s, and none can be made beside the transaction", ErrFormat, missing)
	}
	return c.ensure(ctx, t, false)
}

// serve does what a first use is for and tells its callers. Close ends it.
func (c *Coord) serve(t *table, use *firstUse) {
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.Timeout)
	defer cancel()
	use.err = c.format.ensure(ctx, t)
	c.mu.Lock()
	defer c.mu.Unlock()
	if use.err == nil || errors.Is(use.err, ErrFormat) { // Else nothing new is known.
		t.ready.Store(use.err == nil)
	}
	t.use = nil
	close(use.done)
}

// wait waits for the first use of t and returns its error, or that of ctx if it ends
// before.
func (f *firstUse) wait(ctx context.Context, t *table) error {
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return fmt.Errorf("first use of table %s: %w", t.name, ended(ctx))
	}
}

// notice looks for t on the pool, in the background, and remembers it if it is there.
// It makes nothing: a transaction that has made t may not have been committed yet. It
// must be called during an operation.
func (c *Coord) notice(t *table) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.noticed || t.use != nil || t.ready.Load() {
		return
	}
	t.noticed = true
	c.busy.Go(func() {
		ctx, cancel := context.WithTimeout(c.ctx, c.cfg.Timeout)
		defer cancel()
		missing, err := c.format.missingOnPool(ctx, t)
		if err == nil && missing == "" {
			err = c.format.prepare(ctx, t)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		t.noticed = false
		if err == nil && missing == "" && t.use == nil { // A first use decides for itself.
			t.ready.Store(true)
		}
	})
}

// missing reports whether t does not exist. It makes nothing.
func (c *Coord) missing(ctx context.Context, t *table) (bool, error) {
	if t.ready.Load() {
		return false, nil
	}
	missing, err := c.format.missingOnPool(ctx, t)
	return missing != "", err
}

// ensure looks, makes what is missing, and looks again: another version may have
// been faster.
func (s *formatStore) ensure(ctx context.Context, t *table) error {
	missing, err := s.missingOnPool(ctx, t)
	if err != nil {
		return err
	}
	if missing != "" {
		if s.c.cfg.DDL == DDLManual {
			return fmt.Errorf("%w: %s", ErrFormat, missing)
		}
		// One message without parameters: on Postgres one transaction, and the lock at its head serialises it.
		_, err := pooled(ctx, s.c, func(ctx context.Context, on conn) (sql.Result, error) {
			return on.on.ExecContext(ctx, s.ddl+"\n"+t.ddl)
		})
		if err != nil {
			return fmt.Errorf("make table %s: %w", t.name, err)
		}
		if missing, err = s.missingOnPool(ctx, t); err != nil {
			return err
		}
		if missing != "" {
			return fmt.Errorf("%w: %s, though just made", ErrFormat, missing)
		}
	}
	return s.prepare(ctx, t)
}

// prepare prepares the statements of t that run inside callers' transactions, so that they
// take one round trip there: inside, a second connection can't be waited for.
func (s *formatStore) prepare(ctx context.Context, t *table) error {
	_, err := pooled(ctx, s.c, func(ctx context.Context, _ conn) (struct{}, error) {
		for _, text := range t.guards {
			if _, err := s.c.prepare(ctx, text); err != nil {
				return struct{}{}, fmt.Errorf("prepare: %w", err)
			}
		}
		return struct{}{}, nil
	})
	return err
}

// missing says what t lacks, "" if nothing. It returns [ErrFormat] if t, or what
// records the formats, is of an unknown format or out of place.
func (s *formatStore) missing(ctx context.Context, on conn, t *table) (string, error) {
	at, home, err := s.look(ctx, on, s.schema, s.name)
	if err != nil || at == "" {
		return "no table " + s.name, err
	}
	formats, err := s.read(ctx, on)
	if err != nil {
		return "", err
	}
	for _, name := range []string{s.name, t.record} {
		if format, recorded := formats[name]; recorded && format != knownFormat {
			return "", fmt.Errorf("%w: table %s has format %d, this version knows %d", ErrFormat, name, format, knownFormat)
		}
	}
	found, _, err := s.look(ctx, on, t.schema, t.name)
	_, recorded := formats[t.record]
	switch {
	case err != nil:
		return "", err
	case found != "" && recorded:
		return "", nil
	case at != home && s.schema == "":
		// Elsewhere on the search_path. A table made at its head would stand beside the others, and hide those made there.
		return "", fmt.Errorf("%w: no table %s, and %s is in schema %s but new tables would be in %s: set Config.Schema", ErrFormat, t.name, s.name, at, home)
	case found == "":
		return "no table " + t.name, nil
	}
	return "no format record for table " + t.name, nil
}

// missingOnPool is missing by a look on the pool.
func (s *formatStore) missingOnPool(ctx context.Context, t *table) (string, error) {
	return pooled(ctx, s.c, func(ctx context.Context, _ conn) (string, error) { return s.missing(ctx, unprepared(s.c.db), t) })
}

// recorded returns the format records, by table; none if there is no table of them.
func (s *formatStore) recorded(ctx context.Context) (map[string]int64, error) {
	return pooled(ctx, s.c, func(ctx context.Context, _ conn) (map[string]int64, error) {
		on := unprepared(s.c.db)
		at, _, err := s.look(ctx, on, s.schema, s.name)
		if err != nil || at == "" {
			return nil, err
		}
		return s.read(ctx, on)
	})
}

// look returns the schema that has a table, "" if none, and that where it would be
// made.
func (s *formatStore) look(ctx context.Context, on conn, schema, name string) (at, home string, err error) {
	if _, err = on.row(ctx, s.where, []any{schema, name}, &at, &home); err != nil {
		err = fmt.Errorf("look for table %s: %w", name, err)
	}
	return at, home, err
}

// read returns the format records, by table.
func (s *formatStore) read(ctx context.Context, on conn) (map[string]int64, error) {
	formats := map[string]int64{}
	var name string
	var format int64
	err := on.each(ctx, s.formats, nil, func(row func(...any) error) error {
		err := row(&name, &format)
		formats[name] = format
		return err
	})
	if err != nil {
		err = fmt.Errorf("read formats: %w", err)
	}
	return formats, err
}

// beside reports whether a table can be made while a caller's transaction is open. On SQLite
// the DDL would wait for the transaction, and on a pool of one for its only connection.
func (c *Coord) beside() bool {
	return c.dialect.Name() != SQLite.Name() && c.db.Stats().MaxOpenConnections != 1
}
