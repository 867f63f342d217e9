package coord

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
)

// knownFormat is the format of every table that this version makes and reads.
const knownFormat = 1

// table is one table of a primitive: what makes it, and whether it has been seen.
type table struct {
	name   string // without the schema
	ddl    string
	guards []string      // statements that run inside callers' transactions
	purge  string        // (age, now) deletes what has expired longer than age ago; "" if nothing may go
	ready  atomic.Bool   // seen, in the known format
	turn   chan struct{} // holds one: only one operation looks at a time
}

// formatStore knows which tables there are and in which format.
type formatStore struct {
	c       *Coord
	name    string
	ddl     string
	exists  string // (schema, table) row of (bool)
	formats string // () rows of (table, format)
}

func (s *formatStore) load(c *Coord) error {
	ddl, ok, err := load(c.dialect, c.names, "format.sql", section{"exists", &s.exists}, section{"formats", &s.formats})
	if err == nil && !ok {
		err = fmt.Errorf("coord: dialect %s: %w", c.dialect.Name(), invalid("format.sql is missing"))
	}
	s.c, s.name, s.ddl = c, c.names.table("coord_format"), ddl
	return err
}

// Migrate makes the tables of every primitive, with their format records, where
// they are missing. It looks first and runs no DDL where all is there; many
// processes may call it at once. Under [DDLManual] it only checks, and returns
// [ErrFormat] if a table is missing. It also returns ErrFormat, having touched
// nothing, for tables of a format that this version does not know.
//
// Nobody has to call it: a table is made on its first use.
func (c *Coord) Migrate(ctx context.Context, types ...ReservationScope) error {
	if len(types) > 0 {
		return wrap("migrate reservations", errors.ErrUnsupported)
	}
	ctx, done, err := c.begin(ctx)
	if err != nil {
		return wrap("migrate", err)
	}
	defer done()
	for _, t := range c.tables {
		if err := c.ensure(ctx, t); err != nil {
			return wrap("migrate", err)
		}
	}
	return nil
}

// Schema returns the DDL and the format records as Migrate would run them where
// nothing is there yet, for people who apply them by hand, in one transaction.
func (c *Coord) Schema(types ...ReservationScope) (string, error) {
	if len(types) > 0 {
		return "", wrap("schema of reservations", errors.ErrUnsupported)
	}
	parts := []string{c.format.ddl}
	for _, t := range c.tables {
		parts = append(parts, t.ddl)
	}
	return strings.Join(parts, "\n\n") + "\n", nil
}

// newTable registers a table under its default name.
func (c *Coord) newTable(name, ddl string) *table {
	t := &table{name: c.names.table(name), ddl: ddl, turn: make(chan struct{}, 1)}
	c.tables = append(c.tables, t)
	return t
}

// ensure makes sure, once, that t is there and in the known format. A failure is
// tried again by the next operation.
func (c *Coord) ensure(ctx context.Context, t *table) error {
	if t == nil {
		return fmt.Errorf("dialect %s: %w", c.dialect.Name(), errors.ErrUnsupported)
	}
	if t.ready.Load() {
		return nil
	}
	select {
	case <-ctx.Done():
		return ended(ctx)
	case t.turn <- struct{}{}:
	}
	defer func() { <-t.turn }()
	if t.ready.Load() {
		return nil
	}
	_, err := await(ctx, func() (struct{}, error) { return struct{}{}, c.format.ensure(ctx, t) }, func(struct{}, error) {})
	if err == nil {
		t.ready.Store(true)
	}
	return err
}

// missing tells whether t is not there, without making it.
func (c *Coord) missing(ctx context.Context, t *table) (bool, error) {
	if t.ready.Load() {
		return false, nil
	}
	missing, err := await(ctx, func() (string, error) { return c.format.missing(ctx, t) }, func(string, error) {})
	return missing != "", err
}

// ensure looks, makes what is missing, and looks again: another version may have
// been faster.
func (s *formatStore) ensure(ctx context.Context, t *table) error {
	missing, err := s.missing(ctx, t)
	if err != nil {
		return err
	}
	if missing != "" {
		if s.c.cfg.DDL == DDLManual {
			return fmt.Errorf("%w: %s", ErrFormat, missing)
		}
		// One message without parameters: on Postgres one transaction, and the lock at its head serialises it.
		_, err := retry(ctx, s.c, func() (sql.Result, error) { return s.c.db.ExecContext(ctx, s.ddl+"\n"+t.ddl) })
		if err != nil {
			return fmt.Errorf("make table %s: %w", t.name, err)
		}
		if missing, err = s.missing(ctx, t); err != nil {
			return err
		}
		if missing != "" {
			return fmt.Errorf("%w: %s, though just made", ErrFormat, missing)
		}
	}
	return s.c.prepare(ctx, t.guards)
}

// missing says what t lacks, "" if nothing, and returns [ErrFormat] if it is of an
// unknown format.
func (s *formatStore) missing(ctx context.Context, t *table) (string, error) {
	for _, name := range []string{s.name, t.name} {
		var there bool
		if err := s.c.db.QueryRowContext(ctx, s.exists, s.c.cfg.Schema, name).Scan(&there); err != nil {
			return "", fmt.Errorf("look for table %s: %w", name, err)
		}
		if !there {
			return "no table " + name, nil
		}
	}
	formats, err := s.read(ctx)
	if err != nil {
		return "", fmt.Errorf("read formats: %w", err)
	}
	for _, name := range []string{s.name, t.name} {
		switch format, recorded := formats[name]; {
		case !recorded:
			return "no format record for table " + name, nil
		case format != knownFormat:
			return "", fmt.Errorf("%w: table %s has format %d, this version knows %d", ErrFormat, name, format, knownFormat)
		}
	}
	return "", nil
}

// read returns the format records, by table.
func (s *formatStore) read(ctx context.Context) (map[string]int64, error) {
	formats := map[string]int64{}
	var name string
	var format int64
	rows, err := s.c.db.QueryContext(ctx, s.formats)
	err = scanRows(rows, err, func() error {
		err := rows.Scan(&name, &format)
		formats[name] = format
		return err
	})
	return formats, err
}
