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
	done     chan struct{} // closed at the end; what follows is only read after that
	err      error
	panicked any // what the driver panicked with, for every caller that waits
}

// formatStore knows which tables there are and in which format.
type formatStore struct {
	c       *Coord
	schema  string
	name    string
	ddl     string
	where   string // (schema, table) row of (the schema that has the table, or ""; the schema where it would be made)
	formats string // () rows of (table, format)
}

func (s *formatStore) load(c *Coord) error {
	ddl, ok, err := load(c.dialect, c.names, "format.sql", section{"where", &s.where}, section{"formats", &s.formats})
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
		if err := c.ensureAfresh(ctx, t); err != nil {
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
			return retry(ctx, c, func() (int64, error) { return c.exec(ctx, text, micros(age), c.now()) })
		}, nil)
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
// by the next operation.
func (c *Coord) ensure(ctx context.Context, t *table) error {
	if t == nil {
		return c.unsupported()
	}
	if t.ready.Load() {
		return nil
	}
	use := c.firstUse(t, false)
	if use == nil {
		return nil
	}
	return use.wait(ctx, t)
}

// ensureAfresh is ensure by a look that began after the call, though t may be ready.
func (c *Coord) ensureAfresh(ctx context.Context, t *table) error {
	if earlier := c.inProgress(t); earlier != nil {
		// What it saw may be out of date. A database out of reach is that for everybody.
		if err := earlier.wait(ctx, t); err != nil && !errors.Is(err, ErrFormat) {
			return err
		}
	}
	return c.firstUse(t, true).wait(ctx, t)
}

// firstUse returns the first use of t that is in progress, or begins one. If t is
// ready it returns nil, unless again is set. It must be called during an operation.
func (c *Coord) firstUse(t *table, again bool) *firstUse {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.use == nil {
		if t.ready.Load() && !again {
			return nil
		}
		use := &firstUse{done: make(chan struct{})}
		t.use = use
		c.busy.Go(func() { c.serve(t, use) })
	}
	return t.use
}

// inProgress returns the first use of t that is in progress; nil if there is none.
func (c *Coord) inProgress(t *table) *firstUse {
	c.mu.Lock()
	defer c.mu.Unlock()
	return t.use
}

// serve does what a first use is for and tells its callers. Close ends it.
func (c *Coord) serve(t *table, use *firstUse) {
	defer func() {
		use.panicked = recover()
		c.mu.Lock()
		defer c.mu.Unlock()
		t.ready.Store(use.err == nil && use.panicked == nil)
		t.use = nil
		close(use.done)
	}()
	ctx, cancel := context.WithTimeout(c.life, c.cfg.Timeout)
	defer cancel()
	use.err = c.format.ensure(ctx, t)
}

// wait waits for the first use of t and returns its error, or that of ctx if it ends
// before.
func (f *firstUse) wait(ctx context.Context, t *table) error {
	select {
	case <-f.done:
	case <-ctx.Done():
		return fmt.Errorf("first use of table %s: %w", t.name, ended(ctx))
	}
	if f.panicked != nil {
		panic(f.panicked)
	}
	return f.err
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
		ctx, cancel := context.WithTimeout(c.life, c.cfg.Timeout)
		defer cancel()
		missing, err := c.format.missing(ctx, c.db, t)
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
	missing, err := c.format.missing(ctx, c.db, t)
	return missing != "", err
}

// ensure looks, makes what is missing, and looks again: another version may have
// been faster.
func (s *formatStore) ensure(ctx context.Context, t *table) error {
	missing, err := s.missing(ctx, s.c.db, t)
	if err != nil {
		return err
	}
	if missing != "" {
		if s.c.cfg.DDL == DDLManual {
			return fmt.Errorf("%w: %s", ErrFormat, missing)
		}
		// One message without parameters: on Postgres one transaction, and the lock at its head serialises it.
		_, err := step(ctx, s.c, func(ctx context.Context) (sql.Result, error) { return s.c.db.ExecContext(ctx, s.ddl+"\n"+t.ddl) })
		if err != nil {
			return fmt.Errorf("make table %s: %w", t.name, err)
		}
		if missing, err = s.missing(ctx, s.c.db, t); err != nil {
			return err
		}
		if missing != "" {
			return fmt.Errorf("%w: %s, though just made", ErrFormat, missing)
		}
	}
	return s.prepare(ctx, t)
}

// prepare prepares the statements of t that run inside callers' transactions.
func (s *formatStore) prepare(ctx context.Context, t *table) error {
	_, err := step(ctx, s.c, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.c.prepareGuards(ctx, t.guards) })
	return err
}

// missing says what t lacks, "" if nothing. It returns [ErrFormat] if t, or what
// records the formats, is of an unknown format or out of place. It looks on the
// pool or through the caller's transaction.
func (s *formatStore) missing(ctx context.Context, on DBTX, t *table) (string, error) {
	at, home, err := s.look(ctx, on, s.schema, s.name)
	if err != nil || at == "" {
		return "no table " + s.name, err
	}
	formats, err := ask(ctx, s.c, on, s.read)
	if err != nil {
		return "", fmt.Errorf("read formats: %w", err)
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

// recorded returns the format records, by table; none if there is no table of them.
func (s *formatStore) recorded(ctx context.Context) (map[string]int64, error) {
	at, _, err := s.look(ctx, s.c.db, s.schema, s.name)
	if err != nil || at == "" {
		return nil, err
	}
	formats, err := ask(ctx, s.c, s.c.db, s.read)
	if err != nil {
		err = fmt.Errorf("read formats: %w", err)
	}
	return formats, err
}

// look returns the schema that has a table, "" if none, and that where it would be
// made.
func (s *formatStore) look(ctx context.Context, on DBTX, schema, name string) (at, home string, err error) {
	places, err := ask(ctx, s.c, on, func(ctx context.Context, on DBTX) (places [2]string, err error) {
		err = on.QueryRowContext(ctx, s.where, schema, name).Scan(&places[0], &places[1])
		return places, err
	})
	if err != nil {
		err = fmt.Errorf("look for table %s: %w", name, err)
	}
	return places[0], places[1], err
}

// read returns the format records, by table.
func (s *formatStore) read(ctx context.Context, on DBTX) (map[string]int64, error) {
	formats := map[string]int64{}
	var name string
	var format int64
	rows, err := on.QueryContext(ctx, s.formats)
	err = scanRows(rows, err, func() error {
		err := rows.Scan(&name, &format)
		formats[name] = format
		return err
	})
	return formats, err
}

// ask is a step on the pool, or a statement in the caller's transaction, which goes
// by ctx and can't be sent again.
func ask[T any](ctx context.Context, c *Coord, on DBTX, do func(context.Context, DBTX) (T, error)) (T, error) {
	if on != DBTX(c.db) {
		return do(ctx, on)
	}
	return step(ctx, c, func(ctx context.Context) (T, error) { return do(ctx, on) })
}

// beside tells whether a table can be made while a caller's transaction is open: on
// SQLite it would wait for that, and so it would for the pool's only connection.
func (c *Coord) beside() bool {
	return c.dialect.Name() != SQLite.Name() && c.db.Stats().MaxOpenConnections != 1
}
