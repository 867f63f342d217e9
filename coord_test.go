package coord

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/lib/pq"
)

// newMock returns a Coord over a mocked database on which the tables are there.
func newMock(t *testing.T, cfg Config) (*Coord, sqlmock.Sqlmock) {
	t.Helper()
	db, mock, err := sqlmock.New(sqlmock.QueryMatcherOption(sqlmock.QueryMatcherEqual))
	if err != nil {
		t.Fatal(err)
	}
	cfg.NoPrepare = true
	c, err := New(db, Postgres, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range c.tables {
		table.ready.Store(true)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections are still borrowed after Close", n)
		}
		mock.ExpectClose()
		db.Close()
		if err := mock.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
	})
	return c, mock
}

// newCoord returns a Coord on a driver of the test's own.
func newCoord(t *testing.T, d *fakeDriver, cfg Config) *Coord {
	t.Helper()
	db := sql.OpenDB(d)
	cfg.NoPrepare = true
	c, err := New(db, Postgres, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range c.tables {
		table.ready.Store(true)
	}
	t.Cleanup(func() { c.Close(); db.Close() })
	return c
}

// fakeDriver answers every statement with answer, which may take its time. It
// knows nothing of contexts, like lib/pq on a connection whose packets are dropped.
type fakeDriver struct {
	mu     sync.Mutex
	opened int
	closed int
	sent   []statement
	answer func(statement) (driver.Rows, error)
	open   func()
	fresh  bool // each statement has a connection of its own: database/sql waits for a result's count on the connection
}

type statement struct {
	conn int // the number of its connection, from 1
	text string
	args []driver.NamedValue
	at   time.Time
}

func (d *fakeDriver) Connect(context.Context) (driver.Conn, error) {
	if d.open != nil {
		d.open()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opened++
	return &fakeConn{d, d.opened}, nil
}

func (d *fakeDriver) Driver() driver.Driver { return nil }

// statements are those sent so far.
func (d *fakeDriver) statements() []statement {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.sent)
}

// connections counts those opened and closed so far.
func (d *fakeDriver) connections() (opened, closed int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.opened, d.closed
}

type fakeConn struct {
	d  *fakeDriver
	id int
}

func (c *fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("not prepared here") }
func (c *fakeConn) Begin() (driver.Tx, error)           { return nil, errors.New("no transactions here") }
func (c *fakeConn) Close() error {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	c.d.closed++
	return nil
}

// IsValid keeps a connection in the pool.
func (c *fakeConn) IsValid() bool { return !c.d.fresh }

func (c *fakeConn) QueryContext(_ context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	s := statement{c.id, text, args, time.Now()}
	c.d.mu.Lock()
	c.d.sent = append(c.d.sent, s)
	c.d.mu.Unlock()
	return c.d.answer(s)
}

func (c *fakeConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	rows, err := c.QueryContext(ctx, text, args)
	if err != nil {
		return nil, err
	}
	if n, ok := rows.(changed); ok {
		return driver.RowsAffected(n.rows), nil
	}
	return driver.RowsAffected(1), nil
}

// changed is the answer to a statement that changes another number of rows than one.
type changed struct {
	noRows
	rows int64
}

// noRows is an answer without rows.
type noRows struct{}

func (noRows) Columns() []string         { return nil }
func (noRows) Close() error              { return nil }
func (noRows) Next([]driver.Value) error { return io.EOF }

func TestNewRefuses(t *testing.T) {
	db := sql.OpenDB(&fakeDriver{})
	defer db.Close()
	long := strings.Repeat("x", 64)
	files := func(change func(fstest.MapFS)) Dialect {
		m := fstest.MapFS{}
		for _, name := range []string{"format.sql", "lease.sql", "member.sql"} {
			text, err := fs.ReadFile(Postgres.SQL(), name)
			if err != nil {
				t.Fatal(err)
			}
			m[name] = &fstest.MapFile{Data: text}
		}
		change(m)
		return fakeDialect{Postgres, m}
	}
	for _, test := range []struct {
		name string
		db   *sql.DB
		d    Dialect
		cfg  Config
		want string // in the error's text
	}{
		{"nil db", nil, Postgres, Config{}, "nil"},
		{"nil dialect", db, nil, Config{}, "nil"},
		{"prefix with a quote", db, Postgres, Config{Prefix: `a"b`}, "prefix"},
		{"prefix with a digit first", db, Postgres, Config{Prefix: "1a"}, "prefix"},
		{"prefix with a letter that is not ASCII", db, Postgres, Config{Prefix: "é"}, "prefix"},
		{"prefix with a newline", db, Postgres, Config{Prefix: "a\n"}, "prefix"},
		{"schema with a dot", db, Postgres, Config{Schema: "a.b"}, "schema"},
		{"schema with a space", db, Postgres, Config{Schema: "a b"}, "schema"},
		{"long schema", db, Postgres, Config{Schema: long}, "schema"},
		{"long table", db, Postgres, Config{Prefix: long[:60]}, "63"},
		{"owner with NUL", db, Postgres, Config{Owner: "a\x00"}, "Owner"},
		{"owner not UTF-8", db, Postgres, Config{Owner: "\xff"}, "Owner"},
		{"long owner", db, Postgres, Config{Owner: strings.Repeat("x", 1025)}, "Owner"},
		{"negative timeout", db, Postgres, Config{Timeout: -1}, "Timeout"},
		{"unknown DDL", db, Postgres, Config{DDL: 2}, "DDL"},
		{"no format.sql", db, files(func(m fstest.MapFS) { delete(m, "format.sql") }), Config{}, "format.sql"},
		{"missing sections", db, files(func(m fstest.MapFS) { m["lease.sql"] = &fstest.MapFile{Data: []byte("-- name: acquire\nSELECT 1")} }), Config{}, "section renew is missing"},
		{"empty section", db, files(func(m fstest.MapFS) {
			m["member.sql"].Data = append(m["member.sql"].Data, "\n-- name: list\n"...)
		}), Config{}, "section list stands twice"},
		{"unknown section", db, files(func(m fstest.MapFS) {
			m["member.sql"].Data = append(m["member.sql"].Data, "\n-- name: dance\nSELECT 1"...)
		}), Config{}, "section dance is unknown"},
	} {
		c, err := New(test.db, test.d, test.cfg)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: New = %v, %v, want ErrInvalid that says %q", test.name, c, err, test.want)
		}
	}
	if _, err := New(db, Postgres, Config{Prefix: long[:63-len("eidlock_fence")], Schema: long[:63]}); err != nil {
		t.Errorf("New with names of just 63 bytes = %v", err)
	}
}

type fakeDialect struct {
	Dialect
	files fs.FS
}

func (d fakeDialect) SQL() fs.FS { return d.files }

func TestReplaceNames(t *testing.T) {
	for _, test := range []struct{ schema, prefix, text, want string }{
		{"", "coord_", "FROM coord_lease l", `FROM "coord_lease" l`},
		{"", "My_", `FROM "coord_lease"`, `FROM "My_lease"`},
		{"app", "x_", "FROM coord_lease AS coordinate, mycoord_x", `FROM "app"."x_lease" AS coordinate, mycoord_x`},
		{"app", "x_", "VALUES ('coord_lease', 1)", "VALUES ('x_lease', 1)"},
		{"app", "x_", `nextval('"coord_mutex_fence"')`, `nextval('"app"."x_mutex_fence"')`},
		{"app", "coord_", "coord_a,coord_b", `"app"."coord_a","app"."coord_b"`},
	} {
		got, err := names{schema: test.schema, prefix: test.prefix}.replace(test.text)
		if got != test.want || err != nil {
			t.Errorf("replace(%q) = %q, %v, want %q", test.text, got, err, test.want)
		}
	}
}

func TestParse(t *testing.T) {
	ddl, sections, err := parse("-- head\nCREATE;\n\n-- name: one\n-- (a) b\nSELECT 1 -- kept\n;\n  -- dropped\n-- name: two\r\nSELECT 2;\r\n")
	if err != nil {
		t.Fatal(err)
	}
	if ddl != "-- head\nCREATE;" || len(sections) != 2 || sections["one"] != "SELECT 1 -- kept\n;" || sections["two"] != "SELECT 2;" {
		t.Errorf("parse = %q, %q", ddl, sections)
	}
}

// TestRefusesBadInput: nothing is sent, and the error names the argument.
func TestRefusesBadInput(t *testing.T) {
	c, _ := newMock(t, Config{})
	ctx, ttl := t.Context(), time.Minute
	bad := map[string]string{"empty": "", "NUL": "a\x00b", "not UTF-8": "a\xffb", "long": strings.Repeat("é", 513)}
	leases, members := c.Leases(), c.Members()
	tx := &sql.Tx{}
	calls := map[string]error{}
	add := func(name string, err error) { calls[name] = err }
	for kind, text := range bad {
		_, err := leases.Acquire(ctx, text, 0, "o", ttl)
		add("group: Acquire "+kind, err)
		_, err = leases.Acquire(ctx, "g", 0, text, ttl)
		add("owner: Acquire "+kind, err)
		_, err = leases.Renew(ctx, text, []int{0}, "o", ttl)
		add("group: Renew "+kind, err)
		_, err = leases.Renew(ctx, "g", nil, text, ttl)
		add("owner: Renew "+kind, err)
		_, err = leases.Release(ctx, text, 0, "o")
		add("group: Release "+kind, err)
		_, err = leases.Release(ctx, "g", 0, text)
		add("owner: Release "+kind, err)
		_, err = leases.Owners(ctx, text)
		add("group: Owners "+kind, err)
		add("group: Guard "+kind, leases.Guard(ctx, tx, Lease{Group: text, Owner: "o", Epoch: 1}))
		add("owner: Guard "+kind, leases.Guard(ctx, tx, Lease{Group: "g", Owner: text, Epoch: 1}))
		_, err = members.Heartbeat(ctx, text, "n", "", ttl, nil)
		add("service: Heartbeat "+kind, err)
		_, err = members.Heartbeat(ctx, "s", text, "", ttl, nil)
		add("node: Heartbeat "+kind, err)
		_, err = members.Heartbeat(ctx, "s", "n", "", ttl, []string{"fine", text})
		add("group: Heartbeat "+kind, err)
		if kind != "empty" {
			_, err = members.Heartbeat(ctx, "s", "n", text, ttl, nil)
			add("address: Heartbeat "+kind, err)
		}
		add("service: Leave "+kind, members.Leave(ctx, text, "n"))
		add("node: Leave "+kind, members.Leave(ctx, "s", text))
		_, err = members.List(ctx, text)
		add("service: List "+kind, err)
	}
	for _, ttl := range []time.Duration{0, -1, time.Millisecond - 1, 10*365*24*time.Hour + 1, math.MaxInt64, math.MinInt64} {
		_, err := leases.Acquire(ctx, "g", 0, "o", ttl)
		add("ttl: Acquire "+ttl.String(), err)
		_, err = leases.Renew(ctx, "g", []int{0}, "o", ttl)
		add("ttl: Renew "+ttl.String(), err)
		_, err = members.Heartbeat(ctx, "s", "n", "", ttl, nil)
		add("ttl: Heartbeat "+ttl.String(), err)
	}
	_, err := leases.Acquire(ctx, "g", -1, "o", ttl)
	add("partition: Acquire", err)
	_, err = leases.Renew(ctx, "g", []int{3, -1}, "o", ttl)
	add("partition: Renew", err)
	_, err = leases.Release(ctx, "g", -1, "o")
	add("partition: Release", err)
	add("partition: Guard", leases.Guard(ctx, tx, Lease{Group: "g", Partition: -1, Owner: "o"}))
	add("tx: Guard nil", leases.Guard(ctx, nil, Lease{Group: "g", Owner: "o"}))
	add("tx: Guard nil *sql.Tx", leases.Guard(ctx, (*sql.Tx)(nil), Lease{Group: "g", Owner: "o"}))
	add("tx: Guard *sql.DB", leases.Guard(ctx, c.db, Lease{Group: "g", Owner: "o"}))
	add("tx: Guard *sql.Conn", leases.Guard(ctx, &sql.Conn{}, Lease{Group: "g", Owner: "o"}))
	add("tx: Guard embedded *sql.DB", leases.Guard(ctx, struct{ *sql.DB }{c.db}, Lease{Group: "g", Owner: "o"}))
	add("tx: LockTx *sql.DB", c.LockTx(ctx, c.db, "m"))
	add("tx: TryLockTx *sql.Conn", c.TryLockTx(ctx, &sql.Conn{}, "m"))
	_, err = c.Purge(ctx, -1)
	add("age: Purge", err)
	for name, err := range calls {
		argument, _, _ := strings.Cut(name, ":")
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), argument) {
			t.Errorf("%s = %v, want ErrInvalid that names it", name, err)
		}
	}
}

// TestStatements: what each operation sends, and what it makes of the answer.
func TestStatements(t *testing.T) {
	at := time.Date(2031, 5, 17, 10, 30, 0, 123456000, time.UTC)
	c, mock := newMock(t, Config{Clock: func() time.Time { return at }})
	ctx, now, minute := t.Context(), at.UnixMicro(), int64(60e6)
	leases, members := c.Leases(), c.Members()

	mock.ExpectQuery(leases.acquire).WithArgs("g", 3, "o", minute, now, sqlmock.AnyArg()).
		WillReturnRows(sqlmock.NewRows([]string{"granted", "owner", "epoch", "expires"}).AddRow(true, "o", 7, now+minute))
	lease, err := leases.Acquire(ctx, "g", 3, "o", time.Minute)
	if err != nil || lease.Group != "g" || lease.Partition != 3 || lease.Owner != "o" || lease.Epoch != 7 || !lease.ExpiresAt.Equal(at.Add(time.Minute)) {
		t.Errorf("Acquire = %+v, %v", lease, err)
	}
	mock.ExpectQuery(leases.acquire).WillReturnRows(sqlmock.NewRows([]string{"granted", "owner", "epoch", "expires"}).AddRow(false, "p", 7, now+1))
	_, err = leases.Acquire(ctx, "g", 3, "o", time.Minute)
	wantHeld(t, err, HeldError{"lease g/3", "p", at.Add(time.Microsecond)})

	mock.ExpectQuery(leases.acquire).WillReturnRows(sqlmock.NewRows([]string{"granted", "owner", "epoch", "expires"}))
	mock.ExpectQuery(leases.holder).WithArgs("g", 3, "o", now).WillReturnRows(sqlmock.NewRows([]string{"owner", "expires"}).AddRow("q", now+2))
	_, err = leases.Acquire(ctx, "g", 3, "o", time.Minute)
	wantHeld(t, err, HeldError{"lease g/3", "q", at.Add(2 * time.Microsecond)})

	// Locked by another transaction: asked for again.
	mock.ExpectQuery(leases.acquire).WillReturnRows(sqlmock.NewRows([]string{"granted", "owner", "epoch", "expires"}))
	mock.ExpectQuery(leases.holder).WillReturnRows(sqlmock.NewRows([]string{"owner", "expires"}))
	mock.ExpectQuery(leases.acquire).WillReturnRows(sqlmock.NewRows([]string{"granted", "owner", "epoch", "expires"}).AddRow(true, "o", 8, now))
	if lease, err := leases.Acquire(ctx, "g", 3, "o", time.Minute); err != nil || lease.Epoch != 8 {
		t.Errorf("Acquire of a row that was locked = %+v, %v", lease, err)
	}

	mock.ExpectQuery(leases.renew).WithArgs("g", "[1,2,9]", "o", minute, now).
		WillReturnRows(sqlmock.NewRows(renewedColumns).AddRow(9, 2, now, true).AddRow(1, 4, now, true))
	renewed, err := leases.Renew(ctx, "g", []int{9, 2, 1, 9}, "o", time.Minute)
	if err != nil || len(renewed) != 2 || renewed[0].Partition != 1 || renewed[0].Epoch != 4 || renewed[1].Partition != 9 || renewed[1].Owner != "o" {
		t.Errorf("Renew = %+v, %v", renewed, err)
	}

	mock.ExpectExec(leases.release).WithArgs("g", 3, "o", 0, sqlmock.AnyArg()).WillReturnResult(sqlmock.NewResult(0, 1))
	if ok, err := leases.Release(ctx, "g", 3, "o"); !ok || err != nil {
		t.Errorf("Release = %v, %v", ok, err)
	}

	mock.ExpectQuery(leases.owners).WithArgs("g", now).
		WillReturnRows(sqlmock.NewRows([]string{"partition", "owner", "epoch", "expires"}).AddRow(1, "p", 4, now))
	owners, err := leases.Owners(ctx, "g")
	if err != nil || len(owners) != 1 || owners[0] != (Lease{"g", 1, "p", 4, time.UnixMicro(now), time.Time{}}) {
		t.Errorf("Owners = %+v, %v", owners, err)
	}

	mock.ExpectQuery(members.heartbeat).WithArgs("s", "n", "addr", `["a","b"]`, minute, now).
		WillReturnRows(sqlmock.NewRows([]string{"expires"}).AddRow(now + minute))
	if m, err := members.Heartbeat(ctx, "s", "n", "addr", time.Minute, []string{"b", "a", "b"}); err != nil || !m.ExpiresAt.Equal(at.Add(time.Minute)) {
		t.Errorf("Heartbeat = %+v, %v", m, err)
	}
	mock.ExpectQuery(members.list).WithArgs("s", now).
		WillReturnRows(sqlmock.NewRows([]string{"node", "address", "groups", "expires"}).AddRow("n", "addr", `["a","b"]`, now))
	if ms, err := members.List(ctx, "s"); err != nil || len(ms) != 1 || ms[0].Address != "addr" || !slices.Equal(ms[0].Groups, []string{"a", "b"}) {
		t.Errorf("List = %+v, %v", ms, err)
	}
	mock.ExpectExec(members.leave).WithArgs("s", "n").WillReturnResult(sqlmock.NewResult(0, 0))
	if err := members.Leave(ctx, "s", "n"); err != nil {
		t.Errorf("Leave = %v", err)
	}
	for table, n := range []int64{1: 5, 2: 2, 3: 4} {
		if n > 0 { // Each until a batch deletes nothing.
			mock.ExpectExec(c.tables[table].purge).WithArgs(minute, now).WillReturnResult(sqlmock.NewResult(0, n))
			mock.ExpectExec(c.tables[table].purge).WithArgs(minute, now).WillReturnResult(sqlmock.NewResult(0, 0))
		}
	}
	mock.ExpectQuery(c.format.where).WithArgs("", "coord_format").WillReturnRows(sqlmock.NewRows([]string{"at", "home"}).AddRow("", "public")) // No other types.
	if n, err := c.Purge(ctx, time.Minute); n != 11 || err != nil {
		t.Errorf("Purge = %d, %v", n, err)
	}

	mock.ExpectBegin()
	mock.ExpectQuery(leases.guard).WithArgs("g", 3, "o", 7, now).WillReturnRows(sqlmock.NewRows([]string{"held"}).AddRow(true))
	mock.ExpectQuery(leases.guard).WillReturnRows(sqlmock.NewRows([]string{"held"}))
	mock.ExpectRollback()
	tx, err := c.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := leases.Guard(ctx, tx, lease); err != nil {
		t.Errorf("Guard = %v", err)
	}
	if err := leases.Guard(ctx, tx, lease); !errors.Is(err, ErrLost) {
		t.Errorf("Guard without a row = %v, want ErrLost", err)
	}
	tx.Rollback()
}

func wantHeld(t *testing.T, err error, want HeldError) {
	t.Helper()
	var held *HeldError
	if !errors.Is(err, ErrHeld) || !errors.As(err, &held) || held.What != want.What || held.Owner != want.Owner || !held.ExpiresAt.Equal(want.ExpiresAt) {
		t.Errorf("error = %+v, want %+v", err, want)
	}
}

var renewedColumns = []string{"partition", "epoch", "expires", "renewed"}

// pinnedOperations are those that run on the pinned connection, which their errors end or
// not; the others of operations run on the pool.
var pinnedOperations = map[string]bool{"renew leases g": true, "heartbeat of s/n": true}

// operations are those of leases and members, and Purge.
var operations = map[string]func(context.Context, *Coord) error{
	"acquire lease g/3": func(ctx context.Context, c *Coord) error {
		_, err := c.Leases().Acquire(ctx, "g", 3, "o", time.Minute)
		return err
	},
	"renew leases g": func(ctx context.Context, c *Coord) error {
		_, err := c.Leases().Renew(ctx, "g", []int{3}, "o", time.Minute)
		return err
	},
	"release lease g/3": func(ctx context.Context, c *Coord) error {
		_, err := c.Leases().Release(ctx, "g", 3, "o")
		return err
	},
	"owners of leases g": func(ctx context.Context, c *Coord) error { _, err := c.Leases().Owners(ctx, "g"); return err },
	"heartbeat of s/n": func(ctx context.Context, c *Coord) error {
		_, err := c.Members().Heartbeat(ctx, "s", "n", "", time.Minute, nil)
		return err
	},
	"leave of s/n":      func(ctx context.Context, c *Coord) error { return c.Members().Leave(ctx, "s", "n") },
	"list members of s": func(ctx context.Context, c *Coord) error { _, err := c.Members().List(ctx, "s"); return err },
}

// detached are those that go through under a context that has ended.
var detached = map[string]bool{"release lease g/3": true, "leave of s/n": true}

// TestDriverErrors: every operation passes the driver's error on, and says what it
// was about. A statement's failure keeps the connection, a connection's does not.
func TestDriverErrors(t *testing.T) {
	for op, call := range operations {
		for _, test := range []struct {
			err  error
			keep bool
		}{
			{&pq.Error{Code: "42501"}, true},
			{&pq.Error{Code: "57P01"}, false},
			{&pq.Error{Code: "25006"}, false}, // read-only
			{&pq.Error{Code: "0A000"}, false},
			{&pq.Error{Code: "53300"}, false},
			{&pq.Error{Code: "XX000"}, false},
			{errors.New("broken pipe"), false},
			{sql.ErrConnDone, false}, // what database/sql makes of ErrBadConn on a kept connection
		} {
			t.Run(fmt.Sprint(op, test.err), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return nil, test.err }}
					c := newCoord(t, d, Config{})
					err := call(t.Context(), c)
					if !errors.Is(err, test.err) || !strings.HasPrefix(err.Error(), "coord: "+op+": ") {
						t.Errorf("= %v, want %v with %q before it", err, test.err, op)
					}
					synctest.Wait()
					if _, closed := d.connections(); pinnedOperations[op] && (closed == 0) != test.keep {
						t.Errorf("%d connections closed, want kept %v", closed, test.keep)
					}
				})
			})
		}
	}
}

// TestContextAlreadyDone: nothing is sent.
func TestContextAlreadyDone(t *testing.T) {
	cause := errors.New("went home")
	for op, call := range operations {
		d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return nil, &pq.Error{Code: "42501"} }}
		c := newCoord(t, d, Config{})
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		err := call(ctx, c)
		if detached[op] {
			if len(d.statements()) != 1 {
				t.Errorf("%s: %d statements, want it to go through", op, len(d.statements()))
			}
			continue
		}
		if opened, _ := d.connections(); !errors.Is(err, cause) || !errors.Is(err, context.Canceled) || opened != 0 {
			t.Errorf("%s = %v after %d connections, want %v and context.Canceled, nothing sent", op, err, opened, cause)
		}
	}
}

// TestRetries: what the database asks to be sent again is sent again, a bounded
// number of times.
func TestRetries(t *testing.T) {
	for _, failure := range []*pq.Error{{Code: "40001"}, {Code: "40P01"}} {
		synctest.Test(t, func(t *testing.T) {
			failures := 3
			d := &fakeDriver{}
			d.answer = func(statement) (driver.Rows, error) {
				if failures--; failures >= 0 {
					return nil, failure
				}
				return noRows{}, nil
			}
			c := newCoord(t, d, Config{})
			if ok, err := c.Leases().Release(t.Context(), "g", 3, "o"); !ok || err != nil || len(d.sent) != 4 {
				t.Errorf("%s: Release = %v, %v after %d statements, want true after 4", failure.Code, ok, err, len(d.sent))
			}
			failures, d.sent = 1000, nil
			if _, err := c.Leases().Release(t.Context(), "g", 3, "o"); err == nil || len(d.sent) != 10 || d.opened != 1 {
				t.Errorf("%s: Release = %v after %d statements, want the error after 10", failure.Code, err, len(d.sent))
			}
		})
	}
}

// TestStuckDriver: a call is waited for no longer than the timeout, whatever the
// driver does; the connection is abandoned, and closed when the driver comes back.
func TestStuckDriver(t *testing.T) {
	for op, call := range operations {
		t.Run(op, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stuck := make(chan struct{})
				d := &fakeDriver{}
				var calls atomic.Int64
				d.answer = func(s statement) (driver.Rows, error) {
					if calls.Add(1) == 2 {
						<-stuck
					}
					return nil, &pq.Error{Code: "42501"}
				}
				c := newCoord(t, d, Config{Timeout: 3 * time.Second})
				call(t.Context(), c) // Pins the connection, which then gets stuck.
				start := time.Now()
				err := call(t.Context(), c)
				if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != 3*time.Second {
					t.Errorf("= %v after %v, want DeadlineExceeded after 3 s", err, took)
				}
				var answer *pq.Error
				if err := call(t.Context(), c); !errors.As(err, &answer) {
					t.Errorf("the next call = %v, want the answer of another connection", err)
				}
				close(stuck)
				synctest.Wait()
				if _, closed := d.connections(); pinnedOperations[op] && closed < 1 {
					t.Error("the abandoned connection was not closed when the driver came back")
				}
			})
		})
	}
}

// TestLostReply: what a lost reply may have granted is released in the background
// by the id of its attempt, even if it is granted only then.
func TestLostReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{}
		c := newCoord(t, d, Config{})
		granted := time.Now().Add(time.Second)
		d.answer = func(s statement) (driver.Rows, error) {
			switch {
			case s.text == c.leases.acquire:
				return nil, driver.ErrBadConn
			case s.at.Before(granted):
				return nil, &pq.Error{Code: "57P03"} // Not there yet.
			}
			return noRows{}, nil
		}
		if _, err := c.Leases().Acquire(t.Context(), "g", 3, "o", time.Minute); !errors.Is(err, driver.ErrBadConn) {
			t.Fatalf("Acquire = %v, want the driver's error", err)
		}
		time.Sleep(2 * time.Second)
		sent := d.statements()
		acquire := sent[0]
		undos := slices.DeleteFunc(slices.Clone(sent), func(s statement) bool { return s.text == c.leases.acquire })
		if len(undos) < 2 || undos[len(undos)-1].at.Before(granted) {
			t.Fatalf("%d undos, want them to go on until it is found", len(undos))
		}
		for _, undo := range undos {
			if undo.text != c.leases.undo || undo.args[2].Value != "o" || undo.args[3].Value != acquire.args[5].Value {
				t.Errorf("sent %v, want an undo of o's attempt %v", undo, acquire.args[5].Value)
			}
		}
		time.Sleep(time.Minute)
		if now := d.statements(); len(now) != len(sent) {
			t.Errorf("%d statements more after it was found", len(now)-len(sent))
		}
	})
}

// TestLostReplyDuringClose: the undo still goes out.
func TestLostReplyDuringClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{}
		c := newCoord(t, d, Config{})
		d.answer = func(s statement) (driver.Rows, error) {
			if s.text == c.leases.acquire {
				time.Sleep(time.Second)
				return nil, driver.ErrBadConn
			}
			return noRows{}, nil
		}
		go c.Leases().Acquire(t.Context(), "g", 3, "o", time.Minute)
		synctest.Wait()
		c.Close()
		sent := d.statements()
		if n := len(sent); n < 2 || sent[n-1].text != c.leases.undo {
			t.Errorf("sent %v, want the acquisition and its undo", sent)
		}
	})
}

// TestStuckFirstUse: a look-up that hangs is given up after the timeout too.
func TestStuckFirstUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		d := &fakeDriver{answer: func(statement) (driver.Rows, error) { <-stuck; return noRows{}, nil }}
		c := newCoord(t, d, Config{Timeout: 3 * time.Second})
		c.leases.table.ready.Store(false)
		start := time.Now()
		_, err := c.Leases().Owners(context.Background(), "g")
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != 3*time.Second {
			t.Errorf("Owners = %v after %v, want DeadlineExceeded after 3 s", err, took)
		}
		close(stuck)
	})
}

// TestClockBefore1970: what is released is marked by that moment.
func TestClockBefore1970(t *testing.T) {
	for _, at := range []time.Time{{}, time.Unix(-1, 0)} {
		c, _ := newMock(t, Config{Clock: func() time.Time { return at }})
		if _, err := c.Leases().Owners(t.Context(), "g"); !errors.Is(err, ErrInvalid) {
			t.Errorf("Owners at %v = %v, want ErrInvalid", at, err)
		}
	}
}

// TestRefusalIsNotUndone: a reply that came is believed.
func TestRefusalIsNotUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return nil, &pq.Error{Code: "42501"} }}
		c := newCoord(t, d, Config{})
		c.Leases().Acquire(t.Context(), "g", 3, "o", time.Minute)
		time.Sleep(time.Minute)
		if n := len(d.statements()); n != 1 {
			t.Errorf("%d statements, want the acquisition alone", n)
		}
	})
}

// TestDeadlineCountsFromTheSend: a slow reply shortens what is left.
func TestDeadlineCountsFromTheSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, mock := newMock(t, Config{})
		start := time.Now()
		mock.ExpectQuery(c.leases.acquire).WillDelayFor(2 * time.Second).
			WillReturnRows(sqlmock.NewRows([]string{"granted", "owner", "epoch", "expires"}).AddRow(true, "o", 1, 0))
		lease, err := c.Leases().Acquire(t.Context(), "g", 3, "o", 30*time.Second)
		if want := start.Add(30 * time.Second); err != nil || !lease.Deadline.Equal(want) {
			t.Errorf("Deadline = %v, %v, want %v", lease.Deadline, err, want)
		}
		start = time.Now()
		mock.ExpectQuery(c.leases.renew).WillDelayFor(2 * time.Second).
			WillReturnRows(sqlmock.NewRows(renewedColumns).AddRow(3, 1, 0, true))
		leases, err := c.Leases().Renew(t.Context(), "g", []int{3}, "o", 30*time.Second)
		if want := start.Add(30 * time.Second); err != nil || !leases[0].Deadline.Equal(want) {
			t.Errorf("Deadline = %v, %v, want %v", leases, err, want)
		}
	})
}

// TestOneAtATime: the next renewal waits for its turn, and leaves at once when its
// context ends.
func TestOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{answer: func(statement) (driver.Rows, error) { time.Sleep(time.Second); return noRows{}, nil }}
		c := newCoord(t, d, Config{})
		start := time.Now()
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				if _, err := c.Leases().Renew(t.Context(), "g", []int{3}, "o", time.Minute); err != nil {
					t.Errorf("Renew = %v", err)
				}
			})
		}
		wg.Go(func() {
			time.Sleep(10 * time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), 490*time.Millisecond)
			defer cancel()
			_, err := c.Leases().Renew(ctx, "g", []int{3}, "o", time.Minute)
			if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != 500*time.Millisecond {
				t.Errorf("Renew = %v after %v, want DeadlineExceeded after 500 ms", err, took)
			}
		})
		wg.Wait()
		if took := time.Since(start); took < 3*time.Second || d.opened != 1 || len(d.sent) != 3 {
			t.Errorf("%d statements took %v on %d connections, want 3 after each other on one", len(d.sent), took, d.opened)
		}
	})
}

// TestClose: it lets the statement in flight end, turns those that wait away, and
// leaves nothing behind.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{answer: func(statement) (driver.Rows, error) { time.Sleep(time.Second); return noRows{}, nil }}
		c := newCoord(t, d, Config{})
		start := time.Now()
		running, queued := make(chan error, 1), make(chan error, 1)
		renew := func(to chan error) {
			_, err := c.Leases().Renew(t.Context(), "g", []int{3}, "o", time.Minute)
			to <- err
		}
		go renew(running)
		synctest.Wait()
		go renew(queued)
		synctest.Wait()
		go c.Close()
		if err := <-queued; !errors.Is(err, ErrClosed) || time.Since(start) != 0 {
			t.Errorf("the queued operation = %v after %v, want ErrClosed at once", err, time.Since(start))
		}
		if err := <-running; err != nil || time.Since(start) != time.Second {
			t.Errorf("the running operation = %v after %v, want its result", err, time.Since(start))
		}
		c.Close()
		if n := c.db.Stats().InUse; n != 0 || time.Since(start) != time.Second {
			t.Errorf("%d connections in use after %v", n, time.Since(start))
		}
	})
}

// TestCloseOnAStuckDriver takes no longer than the timeout.
func TestCloseOnAStuckDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		d := &fakeDriver{answer: func(statement) (driver.Rows, error) { <-stuck; return noRows{}, nil }}
		c := newCoord(t, d, Config{Timeout: 3 * time.Second})
		go c.Leases().Release(t.Context(), "g", 3, "o")
		synctest.Wait()
		start := time.Now()
		c.Close()
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("Close took %v, want 3 s", took)
		}
		close(stuck)
	})
}

// TestCloseWhileBorrowing: a pool that has no connection to give does not hold
// Close up.
func TestCloseWhileBorrowing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		d := &fakeDriver{open: func() { <-stuck }, answer: func(statement) (driver.Rows, error) { return noRows{}, nil }}
		c := newCoord(t, d, Config{})
		start := time.Now()
		go func() {
			_, err := c.Leases().Owners(t.Context(), "g")
			if took := time.Since(start); !errors.Is(err, ErrClosed) || took != 0 {
				t.Errorf("Owners = %v after %v, want ErrClosed at once", err, took)
			}
		}()
		synctest.Wait()
		c.Close()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("Close took %v, want to wait 5 s for the driver", took)
		}
		close(stuck)
		synctest.Wait()
		if n := c.db.Stats().InUse; n != 0 {
			t.Errorf("%d connections in use after the driver came back", n)
		}
	})
}

func TestClassify(t *testing.T) {
	for _, test := range []struct {
		d    Dialect
		err  error
		want Failure
	}{
		{Postgres, &pq.Error{Code: "40001"}, FailureRetry},
		{Postgres, fmt.Errorf("wrapped: %w", &pq.Error{Code: "40P01"}), FailureRetry},
		{Postgres, &pq.Error{Code: "08006"}, FailureConnection},
		{Postgres, &pq.Error{Code: "57P01"}, FailureConnection},
		{Postgres, &pq.Error{Code: "57014"}, FailureRetry},
		{Postgres, &pq.Error{Code: "26000"}, FailureConnection},
		{Postgres, &pq.Error{Code: "55P03"}, FailureContended},
		{Postgres, &pq.Error{Code: "25006"}, FailureConnection},
		{Postgres, &pq.Error{Code: "53300"}, FailureConnection},
		{Postgres, &pq.Error{Code: "42501"}, FailureOther},
		{Postgres, &pq.Error{Code: "23505"}, FailureOther},
		{Postgres, driver.ErrBadConn, FailureConnection},
		{Postgres, context.DeadlineExceeded, FailureConnection},
		{SQLite, coded(5), FailureRetry},
		{SQLite, coded(262), FailureRetry}, // SQLITE_LOCKED_SHAREDCACHE
		{SQLite, coded(517), FailureRetry}, // SQLITE_BUSY_SNAPSHOT
		{SQLite, coded(19), FailureOther},
		{SQLite, errors.New("database is locked"), FailureRetry},
		{SQLite, errors.New("no such table"), FailureOther},
		{SQLite, driver.ErrBadConn, FailureConnection},
	} {
		if got := test.d.Classify(test.err); got != test.want {
			t.Errorf("%s: Classify(%v) = %d, want %d", test.d.Name(), test.err, got, test.want)
		}
	}
}

type coded int

func (c coded) Error() string { return fmt.Sprint("code ", int(c)) }
func (c coded) Code() int     { return int(c) }

func TestOwner(t *testing.T) {
	db := sql.OpenDB(&fakeDriver{})
	defer db.Close()
	seen := map[string]bool{}
	for range 100 {
		c, err := New(db, SQLite, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if owner := c.Owner(); seen[owner] || strings.Count(owner, "-") < 2 {
			t.Errorf("Owner = %q, want host-pid-random, unique", owner)
		}
		seen[c.Owner()] = true
		c.Close()
	}
	c, err := New(db, SQLite, Config{Owner: "me"})
	if err != nil || c.Owner() != "me" {
		t.Errorf("Owner = %v, %v, want me", c, err)
	}
}

// unheard is a context that has ended, of which nobody is told.
type unheard struct{ context.Context }

func (unheard) Done() <-chan struct{} { return nil }

// TestAwaitTellsTheCause: a driver that notices the end of its context first, and says
// so in words of its own, does not hide what ended it.
func TestAwaitTellsTheCause(t *testing.T) {
	cancelled := errors.New("operation was canceled")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(ErrClosed)
	_, err := await(unheard{ctx}, nil, func() (int, error) { return 0, cancelled }, nil)
	if !errors.Is(err, ErrClosed) || !errors.Is(err, cancelled) {
		t.Fatalf("await = %v, want both %v and ErrClosed", err, cancelled)
	}
}
