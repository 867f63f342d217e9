package coord

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io/fs"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/lib/pq"
)

var testScope = ReservationScope{"sales", "user", "t", "names"}

// readyType is the type of testScope, whose table is there.
func readyType(t *testing.T, c *Coord) *reservationType {
	t.Helper()
	typ, err := c.reservations.of(testScope.Context, testScope.Aggregate)
	if err != nil {
		t.Fatal(err)
	}
	typ.table.ready.Store(true)
	return typ
}

// TestReservationStatements: what each operation sends, and what it makes of the
// answer, on the pool and in a transaction.
func TestReservationStatements(t *testing.T) {
	for _, inTx := range []bool{false, true} {
		at := time.Date(2031, 5, 17, 10, 30, 0, 123456000, time.UTC)
		c, mock := newMock(t, Config{Clock: func() time.Time { return at }})
		typ := readyType(t, c)
		s, ctx, now, minute := c.Reservations(), t.Context(), at.UnixMicro(), int64(60e6)
		o := AggregateRef{"ot", "o"}
		what := "reservation sales/user t/names/k"
		if inTx {
			mock.ExpectBegin()
			tx, err := c.db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			s = s.WithTx(tx)
			defer func() { mock.ExpectRollback(); tx.Rollback() }()
		}
		reserved := []string{"granted", "tenant", "id", "confirmed", "version", "holds", "expires"}
		found := reserved[1:]

		mock.ExpectQuery(typ.reserve).WithArgs("t", "names", "k", "ot", "o", "h", minute, now, sqlmock.AnyArg(), !inTx).
			WillReturnRows(sqlmock.NewRows(reserved).AddRow(true, "ot", "o", true, 7, `["z","h"]`, now+minute))
		r, err := s.Reserve(ctx, testScope, "k", o, "h", time.Minute)
		if err != nil || r.Scope != testScope || r.Key != "k" || r.Owner != o || !r.Confirmed || r.Version != 7 ||
			!slices.Equal(r.Holds, []string{"h", "z"}) || !r.ExpiresAt.Equal(at.Add(time.Minute)) {
			t.Errorf("Reserve = %+v, %v", r, err)
		}
		mock.ExpectQuery(typ.reserve).WillReturnRows(sqlmock.NewRows(reserved).AddRow(false, "pt", "p", false, 0, "[]", now+1))
		_, err = s.Reserve(ctx, testScope, "k", o, "h", time.Minute)
		wantHeld(t, err, HeldError{what, "pt/p", at.Add(time.Microsecond)})
		mock.ExpectQuery(typ.reserve).WillReturnRows(sqlmock.NewRows(reserved).AddRow(false, "", "p", true, 3, "[]", now+1))
		_, err = s.Reserve(ctx, testScope, "k", o, "h", time.Minute)
		wantHeld(t, err, HeldError{what, "/p", time.Time{}})
		if want := "coord: " + what + ": held by another: /p"; err.Error() != want {
			t.Errorf("Reserve = %q, want %q", err, want)
		}
		// A rival was faster, and is read; or it is gone again; or the owner has it now.
		mock.ExpectQuery(typ.reserve).WillReturnRows(sqlmock.NewRows(reserved))
		mock.ExpectQuery(typ.find).WithArgs("t", "names", "k", now).WillReturnRows(sqlmock.NewRows(found).AddRow("pt", "q", false, 0, "[]", now+2))
		_, err = s.Reserve(ctx, testScope, "k", o, "h", time.Minute)
		wantHeld(t, err, HeldError{what, "pt/q", at.Add(2 * time.Microsecond)})
		mock.ExpectQuery(typ.reserve).WillReturnRows(sqlmock.NewRows(reserved))
		mock.ExpectQuery(typ.find).WillReturnRows(sqlmock.NewRows(found))
		_, err = s.Reserve(ctx, testScope, "k", o, "h", time.Minute)
		wantHeld(t, err, HeldError{what, "", time.Time{}})
		mock.ExpectQuery(typ.reserve).WillReturnRows(sqlmock.NewRows(reserved))
		mock.ExpectQuery(typ.find).WillReturnRows(sqlmock.NewRows(found).AddRow("ot", "o", false, 0, "[]", now+2))
		mock.ExpectQuery(typ.reserve).WillReturnRows(sqlmock.NewRows(reserved).AddRow(true, "ot", "o", false, 0, `["h"]`, now))
		if r, err := s.Reserve(ctx, testScope, "k", o, "h", time.Minute); err != nil || r.Owner != o {
			t.Errorf("Reserve that a rival delayed = %+v, %v", r, err)
		}

		one := sqlmock.NewRows([]string{"outcome"})
		mock.ExpectQuery(typ.confirm).WithArgs("t", "names", "k", "ot", "o", 7, now).WillReturnRows(sqlmock.NewRows([]string{"outcome"}).AddRow(3))
		if outcome, err := s.Confirm(ctx, testScope, "k", o, 7); outcome != ConfirmStale || err != nil {
			t.Errorf("Confirm = %v, %v, want stale", outcome, err)
		}
		mock.ExpectQuery(typ.confirm).WillReturnRows(one)
		mock.ExpectQuery(typ.refusal).WithArgs("t", "names", "k", "ot", "o", 7, now).WillReturnRows(sqlmock.NewRows([]string{"outcome"}).AddRow(0))
		mock.ExpectQuery(typ.confirm).WillReturnRows(one)
		mock.ExpectQuery(typ.refusal).WillReturnRows(sqlmock.NewRows([]string{"outcome"}).AddRow(4))
		if outcome, err := s.Confirm(ctx, testScope, "k", o, 7); outcome != ConfirmTaken || err != nil {
			t.Errorf("Confirm = %v, %v, want taken", outcome, err)
		}
		for range maxRivals {
			mock.ExpectQuery(typ.confirm).WillReturnRows(one)
			mock.ExpectQuery(typ.refusal).WillReturnRows(one)
		}
		if outcome, err := s.Confirm(ctx, testScope, "k", o, 7); outcome != 0 || err == nil {
			t.Errorf("Confirm that never has its way = %v, %v, want an error", outcome, err)
		}

		yes := func() *sqlmock.Rows { return sqlmock.NewRows([]string{"was"}).AddRow(true) }
		mock.ExpectQuery(typ.abandon).WithArgs("t", "names", "k", "ot", "o", "h").WillReturnRows(yes())
		if was, err := s.Abandon(ctx, testScope, "k", o, "h"); !was || err != nil {
			t.Errorf("Abandon = %v, %v", was, err)
		}
		mock.ExpectQuery(typ.abandon).WillReturnRows(sqlmock.NewRows([]string{"was"}))
		if was, err := s.Abandon(ctx, testScope, "k", o, "h"); was || err != nil {
			t.Errorf("Abandon without a row = %v, %v, want false", was, err)
		}
		mock.ExpectQuery(typ.release).WithArgs("t", "names", "k", "ot", "o", 7, now).WillReturnRows(yes())
		if was, err := s.Release(ctx, testScope, "k", o, 7); !was || err != nil {
			t.Errorf("Release = %v, %v", was, err)
		}
		mock.ExpectQuery(typ.find).WithArgs("t", "names", "k", now).WillReturnRows(sqlmock.NewRows(found).AddRow("ot", "o", true, 7, "[]", 0))
		if r, ok, err := s.Find(ctx, testScope, "k"); !ok || err != nil || r.Version != 7 || r.Holds == nil || !r.ExpiresAt.IsZero() {
			t.Errorf("Find = %+v, %v, %v", r, ok, err)
		}
		mock.ExpectQuery(typ.find).WillReturnRows(sqlmock.NewRows(found).AddRow("ot", "o", true, 7, "not JSON", 0))
		if r, ok, err := s.Find(ctx, testScope, "k"); ok || err == nil {
			t.Errorf("Find of broken holds = %+v, %v, %v, want an error", r, ok, err)
		}
	}
}

// reservationOperations are all of them, by what their errors start with.
var reservationOperations = map[string]func(context.Context, *ReservationStore) error{
	"reserve reservation sales/user t/names/k": func(ctx context.Context, s *ReservationStore) error {
		_, err := s.Reserve(ctx, testScope, "k", AggregateRef{ID: "o"}, "h", time.Minute)
		return err
	},
	"confirm reservation sales/user t/names/k": func(ctx context.Context, s *ReservationStore) error {
		_, err := s.Confirm(ctx, testScope, "k", AggregateRef{ID: "o"}, 1)
		return err
	},
	"abandon reservation sales/user t/names/k": func(ctx context.Context, s *ReservationStore) error {
		_, err := s.Abandon(ctx, testScope, "k", AggregateRef{ID: "o"}, "h")
		return err
	},
	"release reservation sales/user t/names/k": func(ctx context.Context, s *ReservationStore) error {
		_, err := s.Release(ctx, testScope, "k", AggregateRef{ID: "o"}, 1)
		return err
	},
	"find reservation sales/user t/names/k": func(ctx context.Context, s *ReservationStore) error {
		_, _, err := s.Find(ctx, testScope, "k")
		return err
	},
}

// TestReservationErrors: the driver's error is passed on with what it was about; a
// context that has ended stops all but Abandon and Release; a driver that is stuck
// is not waited for; after Close nothing goes.
func TestReservationErrors(t *testing.T) {
	for op, call := range reservationOperations {
		synctest.Test(t, func(t *testing.T) {
			failure := &pq.Error{Code: "42501"}
			d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return nil, failure }}
			c := newCoord(t, d, Config{})
			readyType(t, c)
			if err := call(t.Context(), c.Reservations()); !errors.Is(err, failure) || !strings.HasPrefix(err.Error(), "coord: "+op+": ") {
				t.Errorf("= %v, want %v with %q before it", err, failure, op)
			}
			sent := len(d.statements())
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			err := call(ctx, c.Reservations())
			detached := strings.HasPrefix(op, "abandon") || strings.HasPrefix(op, "release")
			if after := len(d.statements()); after-sent != map[bool]int{true: 1}[detached] || errors.Is(err, context.Canceled) == detached {
				t.Errorf("%s under a context that has ended = %v after %d statements", op, err, after-sent)
			}
			stuck := make(chan struct{})
			d.answer = func(statement) (driver.Rows, error) { <-stuck; return noRows{}, nil }
			ctx, cancel = context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			start := time.Now()
			err = call(ctx, c.Reservations())
			if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
				t.Errorf("%s on a driver that is stuck = %v after %v", op, err, took)
			}
			close(stuck)
			c.Close()
			for _, s := range []*ReservationStore{c.Reservations(), c.Reservations().WithTx(&sql.Tx{})} {
				if err := call(t.Context(), s); !errors.Is(err, ErrClosed) {
					t.Errorf("%s after Close = %v, want ErrClosed", op, err)
				}
			}
		})
	}
}

// TestReserveLostReply: the hold that may be there is removed by the attempt that
// added it, until it is found.
func TestReserveLostReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{}
		c := newCoord(t, d, Config{})
		typ := readyType(t, c)
		var undos atomic.Int64
		d.answer = func(s statement) (driver.Rows, error) {
			if s.text == typ.reserve {
				return nil, driver.ErrBadConn
			}
			if undos.Add(1) < 3 {
				return nil, &pq.Error{Code: "57P03"}
			}
			return noRows{}, nil
		}
		if _, err := c.Reservations().Reserve(t.Context(), testScope, "k", AggregateRef{ID: "o"}, "h", time.Minute); !errors.Is(err, driver.ErrBadConn) {
			t.Fatalf("Reserve = %v, want the driver's error", err)
		}
		time.Sleep(time.Minute)
		sent := d.statements()
		attempt := sent[0].args[8].Value
		for _, s := range sent { // database/sql has sent it again, under the same id.
			switch {
			case s.text == typ.reserve && s.args[8].Value == attempt:
			case s.text == typ.undo && s.args[0].Value == "t" && s.args[1].Value == "names" && s.args[2].Value == "k" && s.args[3].Value == attempt:
			default:
				t.Errorf("sent %v, want an undo of attempt %v", s, attempt)
			}
		}
		if n := undos.Load(); n != 3 {
			t.Errorf("%d undos, want 3", n)
		}
	})
}

// TestReservationRefusesBadInput: nothing is sent, and the error names the argument.
func TestReservationRefusesBadInput(t *testing.T) {
	c, _ := newMock(t, Config{})
	s, ctx, o := c.Reservations(), t.Context(), AggregateRef{"t", "o"}
	check := func(argument string, errs ...error) {
		t.Helper()
		for i, err := range errs {
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), argument) || !strings.HasPrefix(err.Error(), "coord: ") {
				t.Errorf("operation %d = %v, want ErrInvalid that names %s", i, err, argument)
			}
		}
	}
	all := func(s *ReservationStore, scope ReservationScope, key string, owner AggregateRef) []error {
		_, reserve := s.Reserve(ctx, scope, key, owner, "h", time.Minute)
		_, confirm := s.Confirm(ctx, scope, key, owner, 1)
		_, abandon := s.Abandon(ctx, scope, key, owner, "h")
		_, release := s.Release(ctx, scope, key, owner, 1)
		_, _, find := s.Find(ctx, scope, key)
		if owner != o {
			return []error{reserve, confirm, abandon, release}
		}
		return []error{reserve, confirm, abandon, release, find}
	}
	for _, name := range []string{"", "A", "é", "1a", "_a", "a_", "a__b", "a b", "a-b", "a.b", `a"b`, "a\n", "a\x00", strings.Repeat("a", 64)} {
		for _, scope := range []ReservationScope{{Context: name, Aggregate: "a"}, {Context: "a", Aggregate: name}} {
			argument := "aggregate"
			if scope.Context == name {
				argument = "context"
			}
			if len(name) == 64 {
				argument = "63"
			}
			check(argument, append(all(s, scope, "k", o), c.Migrate(ctx, scope))...)
			_, err := c.Schema(testScope, scope)
			check(argument, err)
		}
	}
	free := 63 - len("coord_reservation____a")
	if _, err := s.of(strings.Repeat("c", free), "a"); err != nil {
		t.Errorf("a table name of 63 bytes = %v", err)
	}
	check("63", all(s, ReservationScope{Context: strings.Repeat("c", free+1), Aggregate: "a"}, "k", o)...)
	for kind, text := range map[string]string{"empty": "", "NUL": "a\x00b", "not UTF-8": "a\xffb", "long": strings.Repeat("é", 513)} {
		check("key", all(s, testScope, text, o)...)
		check("id", all(s, testScope, "k", AggregateRef{"t", text})...)
		_, err := s.Reserve(ctx, testScope, "k", o, text, time.Minute)
		check("hold", err)
		_, err = s.Abandon(ctx, testScope, "k", o, text)
		check("hold", err)
		if kind != "empty" {
			check("tenant", all(s, ReservationScope{"a", "b", text, ""}, "k", o)...)
			check("namespace", all(s, ReservationScope{"a", "b", "", text}, "k", o)...)
			check("tenant", all(s, testScope, "k", AggregateRef{text, "o"})...)
		}
	}
	long := strings.Repeat("x", 867)
	check("2600", all(s, ReservationScope{"a", "b", long, long}, long, o)...)
	for _, ttl := range []time.Duration{0, -1, time.Millisecond - 1, 10*365*24*time.Hour + 1, math.MaxInt64} {
		_, err := s.Reserve(ctx, testScope, "k", o, "h", ttl)
		check("ttl", err)
	}
	_, err := s.Confirm(ctx, testScope, "k", o, -1)
	check("version", err)
	_, err = s.Release(ctx, testScope, "k", o, -1)
	check("version", err)
	for _, tx := range []DBTX{nil, (*sql.Tx)(nil), c.db} {
		check("tx", all(s.WithTx(tx), testScope, "k", o)...)
	}
}

// TestReservationTables: the types' tables have names of their own, with the prefix
// and the schema.
func TestReservationTables(t *testing.T) {
	c, _ := newMock(t, Config{Schema: "app", Prefix: "My_"})
	typ := readyType(t, c)
	if typ.table.schema != "app" || typ.table.name != "My_reservation__sales__user" || typ.table.record != typ.table.name {
		t.Errorf("table = %s.%s, recorded as %s", typ.table.schema, typ.table.name, typ.table.record)
	}
	if !strings.Contains(typ.find, `FROM "app"."My_reservation__sales__user" AS`) {
		t.Errorf("find = %s", typ.find)
	}
	if again := readyType(t, c); again != typ {
		t.Error("the type was loaded twice")
	}
	ddl, err := c.Schema(ReservationScope{Context: "other", Aggregate: "type"})
	if err != nil || !strings.Contains(ddl, `'My_reservation__other__type'`) || strings.Contains(ddl, "context__aggregate") {
		t.Errorf("Schema = %s, %v, want both types", ddl, err)
	}
}

// TestPurgeDiscovers the types that other processes have used.
func TestPurgeDiscovers(t *testing.T) {
	c, mock := newMock(t, Config{})
	where := func(schema string) *sqlmock.Rows {
		return sqlmock.NewRows([]string{"at", "home"}).AddRow(schema, "public")
	}
	formats := sqlmock.NewRows([]string{"table", "format"})
	for _, name := range []string{"coord_format", "coord_lease", "coord_reservation__sales__user", "coord_reservation__lease", "coord_reservation__a__b__c",
		"coord_reservation__A__b", "other_reservation__a__b"} {
		formats.AddRow(name, 1)
	}
	mock.ExpectExec(c.members.table.purge).WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectExec(c.members.table.purge).WillReturnResult(sqlmock.NewResult(0, 0))
	mock.ExpectExec(c.tables[2].purge).WillReturnResult(sqlmock.NewResult(0, 2))
	mock.ExpectExec(c.tables[2].purge).WillReturnResult(sqlmock.NewResult(0, 0))
	mock.ExpectQuery(c.format.where).WithArgs("", "coord_format").WillReturnRows(where("public"))
	mock.ExpectQuery(c.format.formats).WillReturnRows(formats)
	mock.ExpectQuery(c.format.where).WithArgs("", "coord_format").WillReturnRows(where("public"))
	mock.ExpectQuery(c.format.formats).WillReturnRows(sqlmock.NewRows([]string{"table", "format"}).AddRow("coord_reservation__sales__user", 1))
	mock.ExpectQuery(c.format.where).WithArgs("", "coord_reservation__sales__user").WillReturnRows(where("public"))
	typ, err := (&ReservationStore{c: c, types: &reservationTypes{byName: map[[2]string]*reservationType{}}}).of("sales", "user")
	if err != nil {
		t.Fatal(err)
	}
	c.tables = c.tables[:3]
	mock.ExpectExec(typ.purge).WillReturnResult(sqlmock.NewResult(0, 4))
	mock.ExpectExec(typ.purge).WillReturnResult(sqlmock.NewResult(0, 0))
	mock.ExpectExec(typ.trim).WillReturnResult(sqlmock.NewResult(0, 8))
	mock.ExpectExec(typ.trim).WillReturnResult(sqlmock.NewResult(0, 0))
	if n, err := c.Purge(t.Context(), time.Minute); n != 7 || err != nil {
		t.Errorf("Purge = %d, %v, want 7", n, err)
	}
}

func TestReservationFile(t *testing.T) {
	db := sql.OpenDB(&fakeDriver{})
	defer db.Close()
	m := fstest.MapFS{"reservation.sql": {Data: []byte("-- name: reserve\nSELECT 1")}}
	text, err := fs.ReadFile(Postgres.SQL(), "format.sql")
	if err != nil {
		t.Fatal(err)
	}
	m["format.sql"] = &fstest.MapFile{Data: text}
	if _, err := New(db, fakeDialect{Postgres, m}, Config{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "section confirm is missing") {
		t.Errorf("New = %v, want ErrInvalid that names what is missing", err)
	}
	delete(m, "reservation.sql")
	c, err := New(db, fakeDialect{Postgres, m}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for op, call := range reservationOperations {
		if err := call(t.Context(), c.Reservations()); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s = %v, want ErrUnsupported", op, err)
		}
	}
	if err := c.Migrate(t.Context(), testScope); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Migrate = %v, want ErrUnsupported", err)
	}
	c.Close()
}

func TestConfirmOutcome(t *testing.T) {
	for outcome, want := range map[ConfirmOutcome]string{1: "confirmed now", 2: "confirmed before", 3: "stale", 4: "taken", 0: "ConfirmOutcome(0)"} {
		if got := outcome.String(); got != want {
			t.Errorf("String(%d) = %q, want %q", int(outcome), got, want)
		}
	}
}
