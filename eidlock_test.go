package coord

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"reflect"
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

// eidDB is a database that knows the statements of eidlock.sql and nothing else.
type eidDB struct {
	*fakeDriver
	sql *eidSQL

	mu     sync.Mutex
	rows   map[string]eidRow
	locked map[string]bool // the rows that another transaction has locked
	fence  int64
	before func(statement) error // sees a statement before it does anything, and may take its time
	after  func(statement) error // loses the reply of what has been done
}

type eidRow struct {
	owner, anchor  string
	fence, attempt int64
	expires        time.Time // zero once released
}

// newEIDs returns a Coord on an eidDB.
func newEIDs(t *testing.T, cfg Config) (*Coord, *eidDB) {
	t.Helper()
	db := &eidDB{fakeDriver: &fakeDriver{fresh: true}, rows: map[string]eidRow{}}
	c := newCoord(t, db.fakeDriver, cfg)
	db.sql = &c.eids
	db.answer = func(s statement) (driver.Rows, error) {
		if s.text == c.format.terminate {
			return noRows{}, nil
		}
		return db.do(s)
	}
	return c, db
}

func newLocker(t *testing.T, c *Coord, cfg EIDConfig) *EIDLocker {
	t.Helper()
	l, err := c.EIDLocker(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// mustLock locks ids for an anchor.
func mustLock(t *testing.T, l *EIDLocker, anchor string, ids ...string) {
	t.Helper()
	if err := l.AcquireLocks(t.Context(), anchor, ids...); err != nil {
		t.Fatal(err)
	}
}

// do answers a statement as the files under sql say.
func (db *eidDB) do(s statement) (driver.Rows, error) {
	db.mu.Lock()
	before, after := db.before, db.after
	db.mu.Unlock()
	if before != nil {
		if err := before(s); err != nil {
			return nil, err
		}
	}
	rows := db.run(s)
	if after != nil {
		if err := after(s); err != nil {
			return nil, err
		}
	}
	return rows, nil
}

func (db *eidDB) run(s statement) driver.Rows {
	db.mu.Lock()
	defer db.mu.Unlock()
	now := time.Now()
	if s.text == db.sql.renew {
		return db.renew(s, now)
	}
	ids := idsOf(s.args[0])
	number := func(i int) int64 { return s.args[i].Value.(int64) }
	live := func(id string) bool { return db.rows[id].expires.After(now) }
	end := func(ids []string, of func(eidRow) bool) (n int64) {
		for _, id := range ids {
			if row := db.rows[id]; of(row) && !row.expires.IsZero() {
				row.expires = time.Time{}
				db.rows[id] = row
				n++
			}
		}
		return n
	}
	all := func(ids []string, fence int64) bool {
		return !slices.ContainsFunc(ids, func(id string) bool { return !live(id) || db.rows[id].fence != fence })
	}
	switch s.text {
	case db.sql.acquire, db.sql.holder:
		owner, anchor := s.args[1].Value.(string), s.args[2].Value.(string)
		for _, id := range ids {
			if row := db.rows[id]; live(id) && (row.owner != owner || row.anchor != anchor) {
				if s.text == db.sql.holder {
					return &fewRows{{id, row.owner, row.expires.UnixMicro()}}
				}
				return &fewRows{{false, int64(0), id, row.owner, row.expires.UnixMicro()}}
			}
		}
		if s.text == db.sql.holder {
			return noRows{}
		}
		db.fence++
		expires := now.Add(time.Duration(number(3)) * time.Microsecond)
		for _, id := range ids {
			db.rows[id] = eidRow{owner, anchor, db.fence, number(5), expires}
		}
		return &fewRows{{true, db.fence, "", owner, expires.UnixMicro()}}
	case db.sql.undo:
		return changed{rows: end(ids, func(row eidRow) bool { return row.attempt == number(1) })}
	case db.sql.release:
		return changed{rows: end(ids, func(row eidRow) bool { return row.fence == number(1) })}
	case db.sql.check:
		if all(ids, number(1)) {
			return &fewRows{{true}}
		}
		return noRows{}
	}
	panic("unknown statement " + s.text)
}

// renew answers a renewal. It needs db.mu.
func (db *eidDB) renew(s statement, now time.Time) driver.Rows {
	rows := &fewRows{}
	for _, set := range setsOf(s) {
		free := func(id string) bool { row := db.rows[id]; return row.fence != set.fence || !row.expires.After(now) }
		locked := func(id string) bool { return db.locked[id] }
		switch first := set.ids[0]; {
		case slices.ContainsFunc(set.ids, free):
		case slices.ContainsFunc(set.ids, locked):
			*rows = append(*rows, []driver.Value{set.fence, first, false})
		default:
			for _, id := range set.ids {
				row := db.rows[id]
				row.expires = now.Add(set.ttl)
				db.rows[id] = row
			}
			*rows = append(*rows, []driver.Value{set.fence, first, true})
		}
	}
	return rows
}

// sentSet is a set as a renewal asks for it.
type sentSet struct {
	fence int64
	ttl   time.Duration
	ids   []string
}

// setsOf returns the sets of a renewal, the lowest token first.
func setsOf(s statement) (sets []sentSet) {
	var list [][3]json.RawMessage
	err := json.Unmarshal([]byte(s.args[0].Value.(string)), &list)
	for _, fields := range list {
		var set sentSet
		var ttl int64
		err = errors.Join(err, json.Unmarshal(fields[0], &set.fence), json.Unmarshal(fields[1], &ttl), json.Unmarshal(fields[2], &set.ids))
		set.ttl = time.Duration(ttl) * time.Microsecond
		sets = append(sets, set)
	}
	if err != nil {
		panic(err)
	}
	slices.SortFunc(sets, func(a, b sentSet) int { return cmp.Compare(a.fence, b.fence) })
	return sets
}

// renews reports whether s is the renewal of one set with these ids.
func (db *eidDB) renews(s statement, ids ...string) bool {
	if s.text != db.sql.renew {
		return false
	}
	sets := setsOf(s)
	return len(sets) == 1 && slices.Equal(sets[0].ids, ids)
}

func idsOf(arg driver.NamedValue) (ids []string) {
	if err := json.Unmarshal([]byte(arg.Value.(string)), &ids); err != nil {
		panic(err)
	}
	return ids
}

// fewRows is an answer of rows.
type fewRows [][]driver.Value

func (r *fewRows) Columns() []string {
	if len(*r) == 0 {
		return nil
	}
	return make([]string, len((*r)[0]))
}
func (r *fewRows) Close() error { return nil }
func (r *fewRows) Next(to []driver.Value) error {
	if len(*r) == 0 {
		return io.EOF
	}
	copy(to, (*r)[0])
	*r = (*r)[1:]
	return nil
}

// hook sets what sees statements before and after they are done.
func (db *eidDB) hook(before, after func(statement) error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.before, db.after = before, after
}

// failing is a hook that makes statements of one kind fail.
func failing(text string, err error) func(statement) error {
	return failingTimes(math.MaxInt, text, err)
}

// failingTimes is failing for so many of them.
func failingTimes(n int, text string, err error) func(statement) error {
	var left atomic.Int64
	left.Store(int64(n))
	return func(s statement) error {
		if s.text == text && left.Add(-1) >= 0 {
			return err
		}
		return nil
	}
}

// take is what another process does to an id.
func (db *eidDB) take(id string, ttl time.Duration) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.fence++
	db.rows[id] = eidRow{"other", "x", db.fence, 0, time.Now().Add(ttl)}
}

// held is who has which ids now: "1:a 2:b".
func (db *eidDB) held() string {
	db.mu.Lock()
	defer db.mu.Unlock()
	var all []string
	for _, id := range slices.Sorted(maps.Keys(db.rows)) {
		if row := db.rows[id]; row.expires.After(time.Now()) {
			all = append(all, id+":"+row.anchor)
		}
	}
	return strings.Join(all, " ")
}

// of are the statements of one kind sent so far.
func (db *eidDB) of(text string) []statement {
	return slices.DeleteFunc(db.statements(), func(s statement) bool { return s.text != text })
}

func wantHolding(t *testing.T, db *eidDB, want string) {
	t.Helper()
	if got := db.held(); got != want {
		t.Errorf("the database has %q held, want %q", got, want)
	}
}

// wantEmpty checks that nobody stands in a line, and nothing is recorded.
func wantEmpty(t *testing.T, l *EIDLocker) {
	t.Helper()
	for _, mu := range []*sync.Mutex{&l.mu, &l.c.queue.mu, &l.anchors.mu} {
		mu.Lock()
		defer mu.Unlock()
	}
	if n, m, k := len(l.c.queue.of), len(l.anchors.of), len(l.sets); n+m+k != 0 {
		t.Errorf("%d lines for ids, %d for anchors and %d sets are left, want none", n, m, k)
	}
}

func isLost(l *EIDLocker, anchor string) bool {
	select {
	case <-l.Lost(anchor):
		return true
	default:
		return false
	}
}

// wantErrors checks which of the sentinels an error answers to.
func wantErrors(t *testing.T, what string, err error, want ...error) {
	t.Helper()
	for _, sentinel := range want {
		if !errors.Is(err, sentinel) {
			t.Errorf("%s = %v, want it to be %v", what, err, sentinel)
		}
	}
	for _, sentinel := range []error{ErrHeld, ErrLost, ErrAcquireTimeout, ErrSetWidened, ErrClosed, ErrInvalid} {
		if errors.Is(err, sentinel) && !slices.Contains(want, sentinel) {
			t.Errorf("%s = %v, want it not to be %v", what, err, sentinel)
		}
	}
	if len(want) > 0 && err != nil && !strings.HasPrefix(err.Error(), "coord: ") {
		t.Errorf("%s = %v, want it to begin with coord:", what, err)
	}
}

// TestEIDStatements: what each operation sends, and what it makes of the answer.
func TestEIDStatements(t *testing.T) { synctest.Test(t, testEIDStatements) }

func testEIDStatements(t *testing.T) {
	at := time.Date(2031, 5, 17, 10, 30, 0, 123456000, time.UTC)
	c, mock := newMock(t, Config{Owner: "me", Clock: func() time.Time { return at }})
	l := newLocker(t, c, EIDConfig{TTL: time.Minute, Owner: " we\t"})
	ctx, now, minute, s := t.Context(), at.UnixMicro(), int64(60e6), l.sql
	columns := []string{"granted", "fence", "eid", "owner", "expires"}
	acquired := func() *sqlmock.Rows { return sqlmock.NewRows(columns) }
	holder := func() *sqlmock.Rows { return sqlmock.NewRows([]string{"eid", "owner", "expires"}) }
	one := func() *sqlmock.Rows { return sqlmock.NewRows([]string{"held"}).AddRow(true) }
	const all = `["1","2","3"]`

	// The first statement makes the rows. Ids are sorted by bytes, each once.
	mock.ExpectQuery(s.acquire).WithArgs(all, "we", "a", minute, now, sqlmock.AnyArg()).WillReturnRows(acquired().AddRow(true, 0, "", "", 0))
	mock.ExpectQuery(s.acquire).WithArgs(all, "we", "a", minute, now, sqlmock.AnyArg()).WillReturnRows(acquired().AddRow(true, 7, "", "we", now+minute))
	if err := l.AcquireLocks(ctx, "a", "3", "1", "2", "3", "1"); err != nil {
		t.Fatal(err)
	}
	mock.ExpectQuery(s.check).WithArgs(all, 7, now).WillReturnRows(one())
	if err := l.AssertLocksHeld(ctx, "a"); err != nil {
		t.Errorf("AssertLocksHeld = %v", err)
	}
	renewal := func() *sqlmock.Rows { return sqlmock.NewRows([]string{"fence", "eid", "renewed"}) }
	mock.ExpectQuery(s.renew).WithArgs(`[[7,60000000,`+all+`]]`, now).WillReturnRows(renewal().AddRow(7, "1", true))
	if err := l.AcquireLocks(ctx, "a", "1", "2", "3"); err != nil {
		t.Errorf("AcquireLocks of the same = %v", err)
	}
	// Another transaction has locked one of the rows: it is asked for again. An engine may answer for each id.
	mock.ExpectQuery(s.renew).WithArgs(`[[7,60000000,["1","3"]]]`, now).WillReturnRows(renewal().AddRow(7, "1", false))
	mock.ExpectQuery(s.renew).WithArgs(`[[7,60000000,["1","3"]]]`, now).WillReturnRows(renewal().AddRow(7, "1", true).AddRow(7, "3", true))
	mock.ExpectExec(s.release).WithArgs(`["2"]`, 7).WillReturnResult(sqlmock.NewResult(0, 1))
	if err := l.AcquireLocks(ctx, "a", "3", "1"); err != nil {
		t.Errorf("AcquireLocks of fewer = %v", err)
	}
	for _, ids := range [][]string{{"2"}, {"1", "2", "3"}, {"1", "9"}} { // It is not sent at all.
		wantErrors(t, "AcquireLocks of more", l.AcquireLocks(ctx, "a", ids...), ErrSetWidened)
	}
	mock.ExpectBegin()
	mock.ExpectQuery(s.guard).WithArgs(`["1","3"]`, 7, now).WillReturnRows(one())
	mock.ExpectQuery(s.guard).WillReturnRows(sqlmock.NewRows([]string{"held"}))
	mock.ExpectRollback()
	tx, err := c.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Guard(ctx, tx, "a"); err != nil {
		t.Errorf("Guard = %v", err)
	}
	wantErrors(t, "Guard without a row", l.Guard(ctx, tx, "a"), ErrLost)
	wantErrors(t, "Guard of an anchor that has none", l.Guard(ctx, tx, "b"), ErrLost)
	tx.Rollback()
	mock.ExpectExec(s.release).WithArgs(`["1","3"]`, 7).WillReturnResult(sqlmock.NewResult(0, 2))
	l.ReleaseLocks(ctx, "a")
	l.ReleaseLocks(ctx, "a") // Nothing to do, nor for one that is not known.
	l.ReleaseLocks(ctx, "b")
	if err := l.AssertLocksHeld(ctx, "a"); err != nil {
		t.Errorf("AssertLocksHeld of an anchor that has none = %v", err)
	}

	l.cfg.AcquireDeadline = 40 * time.Millisecond // Shorter than the first pause can be.
	mock.ExpectQuery(s.acquire).WillReturnRows(acquired().AddRow(false, 0, "2", "you", now+1))
	wantHeld(t, l.AcquireLocks(ctx, "a", "1", "2"), HeldError{"id 2", "you", at.Add(time.Microsecond)})
	mock.ExpectQuery(s.acquire).WillReturnRows(acquired())
	mock.ExpectQuery(s.holder).WillReturnRows(holder().AddRow("1", "they", now+2))
	wantHeld(t, l.AcquireLocks(ctx, "a", "1", "2"), HeldError{"id 1", "they", at.Add(2 * time.Microsecond)})
	mock.ExpectQuery(s.acquire).WillReturnRows(acquired())
	mock.ExpectQuery(s.holder).WillReturnRows(holder())
	wantHeld(t, l.AcquireLocks(ctx, "a", "1"), HeldError{"locks of a", "", time.Time{}})
	for range 10 { // Purge can't keep it busy for ever.
		mock.ExpectQuery(s.acquire).WillReturnRows(acquired().AddRow(true, 0, "", "", 0))
	}
	wantHeld(t, l.AcquireLocks(ctx, "a", "1"), HeldError{"locks of a", "", time.Time{}})

	if err := l.AcquireLocks(ctx, "a"); err != nil { // Touches nothing.
		t.Errorf("AcquireLocks of nothing = %v", err)
	}
	wantEmpty(t, l)
}

// TestEIDRefusesBadInput: nothing is sent, and the error names the argument.
func TestEIDRefusesBadInput(t *testing.T) {
	c, _ := newMock(t, Config{})
	l := newLocker(t, c, EIDConfig{})
	ctx := t.Context()
	for kind, text := range map[string]string{"empty": "", "NUL": "a\x00b", "not UTF-8": "a\xffb", "long": strings.Repeat("é", 513)} {
		for argument, err := range map[string]error{
			"anchor: AcquireLocks":    l.AcquireLocks(ctx, text, "1"),
			"anchor: of nothing":      l.AcquireLocks(ctx, text),
			"anchor: AssertLocksHeld": l.AssertLocksHeld(ctx, text),
			"anchor: Guard":           l.Guard(ctx, &sql.Tx{}, text),
			"eID: AcquireLocks":       l.AcquireLocks(ctx, "a", "1", text, "2"),
		} {
			name, _, _ := strings.Cut(argument, ":")
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s %s = %v, want ErrInvalid that names it", argument, kind, err)
			}
		}
		l.ReleaseLocks(ctx, text)
		if l.Lost(text) != nil {
			t.Errorf("Lost(%s) is not nil", kind)
		}
	}
	for _, tx := range []DBTX{nil, (*sql.Tx)(nil), c.db, &sql.Conn{}} {
		wantErrors(t, fmt.Sprintf("Guard in a %T", tx), l.Guard(ctx, tx, "a"), ErrInvalid)
	}
	wantEmpty(t, l)
}

// TestEIDConfig: the defaults, what is refused, and the names in YAML.
func TestEIDConfig(t *testing.T) {
	c, _ := newMock(t, Config{Owner: "me"})
	whole := EIDConfig{3 * time.Second, time.Millisecond, time.Millisecond, time.Hour, 1500 * time.Millisecond, "o"}
	for _, test := range []struct{ cfg, want EIDConfig }{
		{EIDConfig{}, EIDConfig{30 * time.Second, 100 * time.Millisecond, 2 * time.Second, time.Minute, 10 * time.Second, "me"}},
		{EIDConfig{-1, -1, -1, -1, -1, " \t"}, EIDConfig{30 * time.Second, 100 * time.Millisecond, 2 * time.Second, time.Minute, 10 * time.Second, "me"}},
		{EIDConfig{TTL: 6 * time.Second, Owner: " o\n"}, EIDConfig{6 * time.Second, 100 * time.Millisecond, 2 * time.Second, time.Minute, 2 * time.Second, "o"}},
		{EIDConfig{TTL: time.Hour, AcquireBackoff: time.Minute}, EIDConfig{time.Hour, time.Minute, time.Minute, time.Minute, 10 * time.Second, "me"}},
		{whole, whole},
	} {
		if l, err := c.EIDLocker(test.cfg); err != nil || l.cfg != test.want {
			t.Errorf("EIDLocker(%+v) = %+v, %v, want %+v", test.cfg, l.cfg, err, test.want)
		}
	}
	for _, cfg := range []EIDConfig{
		{TTL: time.Millisecond - 1},
		{TTL: 10*365*24*time.Hour + 1},
		{TTL: 3 * time.Second, Heartbeat: 1500*time.Millisecond + 1},
		{AcquireBackoff: time.Second, AcquireMaxBackoff: time.Second - 1},
		{AcquireMaxBackoff: 99 * time.Millisecond},
		{Owner: "a\x00"},
		{Owner: "\xff"},
		{Owner: strings.Repeat("x", 1025)},
	} {
		if l, err := c.EIDLocker(cfg); !errors.Is(err, ErrInvalid) || l != nil {
			t.Errorf("EIDLocker(%+v) = %v, %v, want ErrInvalid", cfg, l, err)
		}
	}
	var tags []string
	for field := range reflect.TypeFor[EIDConfig]().Fields() {
		tags = append(tags, field.Tag.Get("yaml"))
	}
	if want := []string{"ttl", "acquireBackoff", "acquireMaxBackoff", "acquireDeadline", "heartbeat", "owner"}; !slices.Equal(tags, want) {
		t.Errorf("yaml tags = %q, want %q", tags, want)
	}
}

// TestEIDUnsupported by a dialect that has no file for it.
func TestEIDUnsupported(t *testing.T) {
	db := sql.OpenDB(&fakeDriver{})
	defer db.Close()
	text, err := fs.ReadFile(Postgres.SQL(), "format.sql")
	if err != nil {
		t.Fatal(err)
	}
	files := fstest.MapFS{"format.sql": {Data: text}}
	c, err := New(db, fakeDialect{Postgres, files}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if l, err := c.EIDLocker(EIDConfig{}); !errors.Is(err, errors.ErrUnsupported) || l != nil {
		t.Errorf("EIDLocker = %v, %v, want ErrUnsupported", l, err)
	}
	c.Close()
	files["eidlock.sql"] = &fstest.MapFile{Data: []byte("-- name: acquire\nSELECT 1")}
	if _, err := New(db, fakeDialect{Postgres, files}, Config{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "section undo is missing") {
		t.Errorf("New = %v, want ErrInvalid that names what is missing", err)
	}
}

// TestEIDErrors: how a wait ends says which errors it is, and nothing stays behind.
func TestEIDErrors(t *testing.T) {
	cause, failure := errors.New("went home"), &pq.Error{Code: "42501"}
	for _, state := range []string{"free", "held by another process", "behind another anchor", "behind the same anchor"} {
		for _, end := range []string{"own deadline", "caller's deadline", "cancel", "database error"} {
			if state == "behind the same anchor" && end == "database error" {
				continue // See TestEIDQueuedForTheAnchor.
			}
			t.Run(state+", "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c, db := newEIDs(t, Config{Timeout: 30 * time.Second})
					l := newLocker(t, c, EIDConfig{TTL: time.Hour})
					var holding string
					ours := func(s statement) bool { return s.text == db.sql.acquire && idsOf(s.args[0])[0] == "1" }
					switch state {
					case "held by another process":
						db.take("2", time.Hour)
						holding = "2:x"
					case "behind another anchor":
						mustLock(t, l, "b", "2")
						holding = "2:b"
					}
					db.hook(func(s statement) error {
						switch {
						case s.text == db.sql.acquire && idsOf(s.args[0])[0] == "0", state == "free" && ours(s):
							time.Sleep(12 * time.Second) // Nobody waits for it that long.
						}
						if end == "database error" && ours(s) && (state != "held by another process" || len(db.of(db.sql.acquire)) > 1) {
							return failure
						}
						return nil
					}, nil)
					if state == "behind the same anchor" {
						go l.AcquireLocks(t.Context(), "a", "0")
						synctest.Wait()
					}
					if end == "own deadline" {
						l.cfg.AcquireDeadline = 10 * time.Second
					}
					ctx, want, start := t.Context(), []error{context.DeadlineExceeded, ErrAcquireTimeout}, time.Now()
					switch end {
					case "caller's deadline":
						timed, cancel := context.WithTimeoutCause(ctx, 10*time.Second, cause)
						defer cancel()
						ctx, want = timed, append(want, cause)
					case "cancel":
						cancelled, cancel := context.WithCancelCause(ctx)
						time.AfterFunc(10*time.Second, func() { cancel(cause) })
						ctx, want = cancelled, []error{context.Canceled, cause}
					case "database error":
						want = []error{failure}
						if state == "behind another anchor" {
							time.AfterFunc(10*time.Second, func() { l.ReleaseLocks(t.Context(), "b") })
							holding = ""
						}
					}
					if state == "free" {
						want = slices.DeleteFunc(want, func(err error) bool { return err == ErrAcquireTimeout })
					} else {
						want = append(want, ErrHeld)
					}
					err := l.AcquireLocks(ctx, "a", "1", "2")
					wantErrors(t, "AcquireLocks", err, want...)
					if took := time.Since(start); end != "database error" && took != 10*time.Second {
						t.Errorf("AcquireLocks took %v, want 10 s", took)
					}
					switch state {
					case "held by another process":
						wantHeld(t, err, HeldError{"id 2", "other", start.Add(time.Hour)})
					case "behind another anchor", "behind the same anchor":
						wantHeld(t, err, HeldError{"locks of a", c.Owner(), time.Time{}})
					}
					if !strings.Contains(err.Error(), "acquire locks of a") {
						t.Errorf("AcquireLocks = %v, want it to say what was attempted", err)
					}
					time.Sleep(time.Minute) // The statement that was left comes back, and is undone.
					l.ReleaseLocks(t.Context(), "a")
					wantHolding(t, db, holding)
					l.ReleaseLocks(t.Context(), "b")
					wantEmpty(t, l)
				})
			})
		}
	}
}

// TestEIDQueuedForTheAnchor: who has waited for another call of the same anchor was
// contended, whatever ends it after that.
func TestEIDQueuedForTheAnchor(t *testing.T) {
	failure := &pq.Error{Code: "42501"}
	for _, test := range []struct {
		takes time.Duration // the second acquisition, after the first has failed
		want  []error
	}{
		{0, []error{failure, ErrHeld}},
		{time.Hour, []error{context.DeadlineExceeded, ErrHeld, ErrAcquireTimeout}},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{Timeout: time.Hour})
			l := newLocker(t, c, EIDConfig{})
			db.hook(func(statement) error { time.Sleep(time.Second); return failure }, nil)
			go l.AcquireLocks(t.Context(), "a", "1")
			synctest.Wait()
			db.hook(func(statement) error { time.Sleep(test.takes); return failure }, nil)
			wantErrors(t, "AcquireLocks", l.AcquireLocks(t.Context(), "a", "2"), test.want...)
			time.Sleep(2 * time.Hour)
			wantEmpty(t, l)
		})
	}
}

// TestEIDDeadlineOfANanosecond: on free ids it is no contention.
func TestEIDDeadlineOfANanosecond(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			db.hook(func(statement) error { time.Sleep(time.Nanosecond); return nil }, nil)
			l := newLocker(t, c, EIDConfig{AcquireDeadline: 1})
			err := l.AcquireLocks(t.Context(), "a", "1")
			if err != nil {
				wantErrors(t, "AcquireLocks", err, context.DeadlineExceeded)
			}
			time.Sleep(time.Minute)
		})
	}
}

// TestEIDContextAlreadyDone: nothing is sent, and the cause is told.
func TestEIDContextAlreadyDone(t *testing.T) {
	cause := errors.New("went home")
	c, mock := newMock(t, Config{})
	l := newLocker(t, c, EIDConfig{})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	mock.ExpectBegin()
	tx, err := c.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	wantErrors(t, "AcquireLocks", l.AcquireLocks(ctx, "a", "1"), context.Canceled, cause)
	wantErrors(t, "AssertLocksHeld", l.AssertLocksHeld(ctx, "a"), context.Canceled, cause)
	wantErrors(t, "Guard", l.Guard(ctx, tx, "a"), context.Canceled, cause)
	mock.ExpectRollback()
	tx.Rollback()
	wantEmpty(t, l)
}

// contendedDialect tells of a lost race by an error.
type contendedDialect struct{ Dialect }

var errRace = errors.New("lost a race")

func (d contendedDialect) Classify(err error) Failure {
	if errors.Is(err, errRace) {
		return FailureContended
	}
	return d.Dialect.Classify(err)
}

// TestEIDContention: what only says that rivals are at it is waited out.
func TestEIDContention(t *testing.T) {
	for _, failure := range []error{&pq.Error{Code: "40001"}, &pq.Error{Code: "40P01"}, errRace} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			c.dialect = contendedDialect{c.dialect}
			l := newLocker(t, c, EIDConfig{AcquireDeadline: 10 * time.Second})
			failures := 12 // More than are sent again without a pause.
			if failure == errRace {
				failures = 1
			}
			db.hook(failingTimes(failures, db.sql.acquire, failure), nil)
			start := time.Now()
			mustLock(t, l, "a", "1")
			if took := time.Since(start); took < 5*time.Millisecond {
				t.Errorf("AcquireLocks took %v, want a pause", took)
			}
			l.ReleaseLocks(t.Context(), "a")
			db.hook(failing(db.sql.acquire, failure), nil)
			err := l.AcquireLocks(t.Context(), "a", "1")
			wantErrors(t, "AcquireLocks", err, ErrHeld, ErrAcquireTimeout, context.DeadlineExceeded, failure)
			wantHeld(t, err, HeldError{What: "locks of a"})
			time.Sleep(time.Minute)
			wantEmpty(t, l)
		})
	}
}

// TestEIDBackoff: each pause is at most twice the one before, half of it at random,
// up to the longest.
func TestEIDBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{AcquireBackoff: 80 * time.Millisecond, AcquireMaxBackoff: time.Second})
		db.take("1", time.Hour)
		l.AcquireLocks(t.Context(), "a", "1")
		tries := db.of(db.sql.acquire)
		if len(tries) < 60 {
			t.Fatalf("%d attempts in a minute, want 60 or more", len(tries))
		}
		most := 80 * time.Millisecond
		for i := range tries[1:] {
			if pause := tries[i+1].at.Sub(tries[i].at); pause < most/2 || pause > most {
				t.Errorf("pause %d = %v, want %v to %v", i+1, pause, most/2, most)
			}
			most = min(2*most, time.Second)
			if before, after := tries[i].args[5].Value.(int64), tries[i+1].args[5].Value.(int64); after <= before {
				t.Errorf("attempt %d after %d, want a larger one", after, before)
			}
		}
	})
}

// TestEIDHeartbeat: all ids of the set, together, for as long as they are held.
func TestEIDHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		start := time.Now()
		mustLock(t, l, "a", "1", "2")
		lost := l.Lost("a")
		time.Sleep(10 * time.Minute)
		last := start
		for _, s := range db.of(db.sql.renew) {
			if pause := s.at.Sub(last); pause < 9*time.Second || pause > 10*time.Second {
				t.Errorf("%v between renewals, want 9 s to 10 s", pause)
			}
			if want := []sentSet{{1, 30 * time.Second, []string{"1", "2"}}}; !reflect.DeepEqual(setsOf(s), want) {
				t.Errorf("renewed %v, want %v", setsOf(s), want)
			}
			last = s.at
		}
		if time.Since(last) > 10*time.Second || isLost(l, "a") {
			t.Errorf("last renewed %v ago, lost %v", time.Since(last), isLost(l, "a"))
		}
		wantHolding(t, db, "1:a 2:a")
		l.ReleaseLocks(t.Context(), "a")
		wantHolding(t, db, "")
		sent := len(db.statements())
		time.Sleep(time.Minute)
		select {
		case <-lost:
			t.Error("Lost is closed by a release")
		default:
		}
		if l.Lost("a") != nil || len(db.statements()) != sent {
			t.Errorf("Lost = %v, %d statements after the release, want nil and none", l.Lost("a"), len(db.statements())-sent)
		}
	})
}

// TestEIDOneFailedRenewal loses nothing, whatever fails, and is soon tried again.
func TestEIDOneFailedRenewal(t *testing.T) {
	for _, failure := range []error{driver.ErrBadConn, &pq.Error{Code: "57P01"}, &pq.Error{Code: "42501"}, &pq.Error{Code: "40001"}} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			l := newLocker(t, c, EIDConfig{})
			mustLock(t, l, "a", "1")
			failures := 11 // What is sent again at once fails a second time.
			if failure.Error() != (&pq.Error{Code: "40001"}).Error() {
				failures = 3
			}
			db.hook(failingTimes(failures, db.sql.renew, failure), nil)
			time.Sleep(time.Hour)
			if isLost(l, "a") {
				t.Errorf("lost after %d times %v, want it kept", failures, failure)
			}
			wantHolding(t, db, "1:a")
			l.ReleaseLocks(t.Context(), "a")
		})
	}
}

// TestEIDSlowRenewals: that they take longer than a heartbeat loses nothing.
func TestEIDSlowRenewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{TTL: 6 * time.Second, Heartbeat: 200 * time.Millisecond})
		mustLock(t, l, "a", "1")
		db.hook(func(s statement) error {
			if s.text == db.sql.renew {
				time.Sleep(1500 * time.Millisecond)
			}
			return nil
		}, nil)
		time.Sleep(time.Minute)
		if isLost(l, "a") {
			t.Error("the locks are lost")
		}
		wantHolding(t, db, "1:a")
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDQueuedToReacquire: who has waited behind another call of its anchor was held up.
func TestEIDQueuedToReacquire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{Timeout: time.Minute})
		l := newLocker(t, c, EIDConfig{TTL: time.Hour})
		mustLock(t, l, "a", "1")
		db.hook(func(s statement) error {
			if s.text == db.sql.renew {
				time.Sleep(2 * time.Second)
			}
			return nil
		}, nil)
		go l.AcquireLocks(t.Context(), "a", "1")
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		wantErrors(t, "AcquireLocks", l.AcquireLocks(ctx, "a", "1"), ErrHeld, ErrAcquireTimeout, context.DeadlineExceeded)
		wantErrors(t, "AcquireLocks of more", l.AcquireLocks(t.Context(), "a", "1", "2"), ErrSetWidened)
		time.Sleep(time.Minute)
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDZeroRows: that one id is gone is final for all, and told at once.
func TestEIDZeroRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		start := time.Now()
		mustLock(t, l, "a", "1", "2")
		db.take("2", time.Hour)
		<-l.Lost("a")
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("lost after %v, want at the first renewal", took)
		}
		wantErrors(t, "AssertLocksHeld", l.AssertLocksHeld(t.Context(), "a"), ErrLost)
		sent := len(db.statements())
		time.Sleep(time.Minute)
		if n := len(db.statements()) - sent; n != 0 {
			t.Errorf("%d statements after the loss, want none", n)
		}
		l.ReleaseLocks(t.Context(), "a")
		wantHolding(t, db, "2:x")
		wantEmpty(t, l)
	})
}

// TestEIDUnreachable: the locks are lost at their deadline less a tenth of the TTL,
// to the nanosecond, be the driver stuck or quick to fail.
func TestEIDUnreachable(t *testing.T) {
	for _, stuck := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			l := newLocker(t, c, EIDConfig{})
			db.hook(func(statement) error { time.Sleep(2 * time.Second); return nil }, nil)
			start := time.Now()
			mustLock(t, l, "a", "1", "2")
			back := make(chan struct{})
			db.hook(func(statement) error {
				if stuck {
					<-back
				}
				return driver.ErrBadConn
			}, nil)
			lost := l.Lost("a")
			<-lost
			if took := time.Since(start); took != 27*time.Second {
				t.Errorf("stuck %v: lost %v after the send, want 27 s", stuck, took)
			}
			if l.Lost("a") != lost {
				t.Error("Lost is another channel after the loss")
			}
			wantErrors(t, "AssertLocksHeld", l.AssertLocksHeld(t.Context(), "a"), ErrLost)
			close(back)
			db.hook(nil, nil)
			if others := newLocker(t, c, EIDConfig{Owner: "others"}); others.AcquireLocks(t.Context(), "a", "1") != nil {
				t.Error("another could not lock it when the TTL was over")
			}
			l.ReleaseLocks(t.Context(), "a")
			if l.Lost("a") != nil {
				t.Error("Lost is not nil after the release")
			}
			wantHolding(t, db, "1:a")
		})
	}
}

// TestEIDLostAnchorAcquiresAfresh, also other ids, and nobody waits for a lost one.
func TestEIDLostAnchorAcquiresAfresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{TTL: 30 * time.Second})
		mustLock(t, l, "a", "1", "2")
		waiting := make(chan error, 1)
		go func() { waiting <- l.AcquireLocks(t.Context(), "b", "2") }()
		synctest.Wait()
		db.take("2", 0)
		lost := l.Lost("a")
		<-lost
		if err := <-waiting; err != nil {
			t.Errorf("AcquireLocks behind a set that was lost = %v", err)
		}
		mustLock(t, l, "a", "1", "3", "4")
		if l.Lost("a") == lost || isLost(l, "a") {
			t.Error("Lost is still that of the former locks")
		}
		wantHolding(t, db, "1:a 2:b 3:a 4:a")
		l.ReleaseLocks(t.Context(), "a")
		l.ReleaseLocks(t.Context(), "b")

		// The loss may only be seen by the next acquisition, or by a check.
		mustLock(t, l, "a", "1", "2")
		lost = l.Lost("a")
		db.take("2", 0)
		mustLock(t, l, "a", "1", "2")
		select {
		case <-lost:
		case <-time.After(time.Second):
			t.Error("Lost of the former locks is open")
		}
		if isLost(l, "a") {
			t.Error("Lost is closed for the fresh locks")
		}
		lost = l.Lost("a")
		db.take("2", 0)
		wantErrors(t, "AssertLocksHeld", l.AssertLocksHeld(t.Context(), "a"), ErrLost)
		synctest.Wait()
		select {
		case <-lost:
		default:
			t.Error("Lost is open when a check has found the loss")
		}
		wantErrors(t, "Guard", l.Guard(t.Context(), &sql.Tx{}, "a"), ErrLost)
		mustLock(t, l, "a", "5")
		wantHolding(t, db, "5:a")
		l.ReleaseLocks(t.Context(), "a")
		wantEmpty(t, l)
	})
}

// TestEIDRelease: it goes through under a context that has ended, and tries again what
// fails.
func TestEIDRelease(t *testing.T) {
	for _, test := range []struct {
		failure  error
		failures int
		sent     int
		holding  string
	}{
		{nil, 0, 1, ""},
		{&pq.Error{Code: "57P01"}, 4, 5, ""},
		{&pq.Error{Code: "40001"}, 12, 13, ""},
		{&pq.Error{Code: "53300"}, 3, 4, ""}, // too many connections
		{&pq.Error{Code: "42501"}, 1000, 0, "1:a"},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			l := newLocker(t, c, EIDConfig{})
			mustLock(t, l, "a", "1")
			db.hook(failingTimes(test.failures, db.sql.release, test.failure), nil)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			l.ReleaseLocks(ctx, "a")
			if n := len(db.of(db.sql.release)); n != test.sent && test.sent > 0 {
				t.Errorf("%v: %d releases, want %d", test.failure, n, test.sent)
			}
			wantHolding(t, db, test.holding)
			wantEmpty(t, l)
		})
	}
}

// TestEIDReleaseOfAStuckDriver takes 5 s, whatever Config.Timeout is and whether a
// renewal is stuck too, and then others of this process may try.
func TestEIDReleaseOfAStuckDriver(t *testing.T) {
	for _, timeout := range []time.Duration{time.Second, time.Minute} {
		for _, renewing := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				c, db := newEIDs(t, Config{Timeout: timeout})
				l := newLocker(t, c, EIDConfig{TTL: time.Hour, Heartbeat: time.Minute})
				mustLock(t, l, "a", "1")
				back := make(chan struct{})
				db.hook(func(s statement) error {
					if s.text == db.sql.release || renewing && s.text == db.sql.renew {
						<-back
					}
					return nil
				}, nil)
				for renewing && len(db.of(db.sql.renew)) == 0 {
					time.Sleep(time.Second)
				}
				start := time.Now()
				next := make(chan time.Duration, 1)
				go func() {
					l.AcquireLocks(t.Context(), "b", "1")
					next <- time.Since(start)
				}()
				synctest.Wait()
				l.ReleaseLocks(t.Context(), "a")
				if took := time.Since(start); took != 5*time.Second {
					t.Errorf("timeout %v, renewing %v: ReleaseLocks took %v, want 5 s", timeout, renewing, took)
				}
				if n := len(db.of(db.sql.release)); (n > 1) != (timeout < releaseTime) {
					t.Errorf("timeout %v: %d releases", timeout, n)
				}
				time.Sleep(time.Second)
				close(back)
				if took := <-next; took < 5*time.Second || took > 9*time.Second {
					t.Errorf("the next had it after %v, want it after the release", took)
				}
				l.ReleaseLocks(t.Context(), "b")
			})
		}
	}
}

// TestEIDReleaseDuringARenewal does not wait for it, which may be of a thousand other sets, and
// the renewal revives nothing.
func TestEIDReleaseDuringARenewal(t *testing.T) {
	for _, seen := range []string{"before", "after"} { // The release does, by the server.
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			l := newLocker(t, c, EIDConfig{})
			mustLock(t, l, "a", "1")
			mustLock(t, l, "b", "2")
			slow := func(s statement) error {
				if s.text == db.sql.renew {
					time.Sleep(2 * time.Second)
				}
				return nil
			}
			if seen == "before" {
				db.hook(slow, nil)
			} else {
				db.hook(nil, slow)
			}
			for len(db.of(db.sql.renew)) == 0 {
				time.Sleep(time.Millisecond)
			}
			lost := l.Lost("a")
			start := time.Now()
			l.ReleaseLocks(t.Context(), "a")
			if took := time.Since(start); took != 0 {
				t.Errorf("seen %s: ReleaseLocks took %v, want no time", seen, took)
			}
			mustLock(t, l, "c", "1")
			time.Sleep(time.Minute)
			select {
			case <-lost:
				t.Errorf("seen %s: Lost is closed by a release", seen)
			default:
			}
			wantHolding(t, db, "1:c 2:b")
			l.ReleaseLocks(t.Context(), "b")
			l.ReleaseLocks(t.Context(), "c")
			wantEmpty(t, l)
		})
	}
}

// TestEIDOneRenewal: the sets of all lockers of a Coord are renewed by one statement, each for its
// own TTL. One that is lost takes no other with it.
func TestEIDOneRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		lockers := []*EIDLocker{newLocker(t, c, EIDConfig{}), newLocker(t, c, EIDConfig{TTL: time.Minute, Owner: "another"})}
		const sets = 1000
		for i := range sets {
			mustLock(t, lockers[i%2], fmt.Sprint("a", i), fmt.Sprint(i), fmt.Sprint(i, "-", i))
		}
		start := time.Now()
		time.Sleep(10 * time.Minute)
		renewals := db.of(db.sql.renew)
		if n := len(renewals); n < 60 || n > 67 {
			t.Errorf("%d renewals in 10 min, want one each 9 s to 10 s", n)
		}
		for _, s := range renewals {
			asked := setsOf(s)
			if len(asked) != sets {
				t.Fatalf("%d sets renewed after %v, want all", len(asked), s.at.Sub(start))
			}
			for i, set := range asked {
				if want := time.Duration(30+30*(i%2)) * time.Second; set.ttl != want {
					t.Fatalf("set %d renewed for %v, want %v", i, set.ttl, want)
				}
			}
		}
		db.take("7-7", time.Hour)
		db.take("8", time.Hour)
		time.Sleep(time.Minute)
		for i := range sets {
			if lost := isLost(lockers[i%2], fmt.Sprint("a", i)); lost != (i == 7 || i == 8) {
				t.Errorf("set %d: lost %v", i, lost)
			}
		}
		if asked := setsOf(db.of(db.sql.renew)[len(db.of(db.sql.renew))-1]); len(asked) != sets-2 {
			t.Errorf("%d sets renewed after two were lost, want %d", len(asked), sets-2)
		}
		for _, l := range lockers {
			l.Close()
		}
		sent := len(db.statements())
		time.Sleep(time.Minute)
		if n := len(db.statements()) - sent; n != 0 {
			t.Errorf("%d statements when all is released, want none", n)
		}
	})
}

// TestEIDEqualTokens: sets that share no id may carry the same token, after a sequence has gone
// back. What becomes of one says nothing of the other.
func TestEIDEqualTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1")
		db.mu.Lock()
		db.fence--
		db.mu.Unlock()
		mustLock(t, l, "b", "2")
		db.take("1", time.Hour)
		time.Sleep(time.Minute)
		if !isLost(l, "a") || isLost(l, "b") {
			t.Errorf("lost a %v, b %v, want a alone", isLost(l, "a"), isLost(l, "b"))
		}
		l.ReleaseLocks(t.Context(), "a")
		l.ReleaseLocks(t.Context(), "b")
	})
}

// lock makes other transactions lock rows, or none.
func (db *eidDB) lock(ids ...string) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.locked = map[string]bool{}
	for _, id := range ids {
		db.locked[id] = true
	}
}

// TestEIDLockedRow: a set whose row another transaction has locked is soon asked for again, and lost
// at its deadline if that goes on. Other sets are renewed meanwhile.
func TestEIDLockedRow(t *testing.T) {
	for _, unlocked := range []time.Duration{25 * time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			l := newLocker(t, c, EIDConfig{})
			start := time.Now()
			mustLock(t, l, "a", "1", "2")
			mustLock(t, l, "b", "3")
			db.lock("2")
			time.AfterFunc(unlocked, func() { db.lock() })
			time.Sleep(27*time.Second - 1)
			if isLost(l, "a") {
				t.Errorf("unlocked after %v: the set is lost before its deadline", unlocked)
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if lost := isLost(l, "a"); lost != (unlocked == time.Hour) {
				t.Errorf("unlocked after %v: lost %v at the deadline", unlocked, lost)
			}
			asked := 0
			for _, s := range db.of(db.sql.renew) {
				if db.renews(s, "1", "2") && s.at.Sub(start) < 20*time.Second {
					asked++
				}
			}
			if asked < 5 || asked > 30 {
				t.Errorf("unlocked after %v: the locked set was asked for %d times in 10 s", unlocked, asked)
			}
			time.Sleep(time.Minute)
			if isLost(l, "b") {
				t.Error("another set is lost")
			}
			l.ReleaseLocks(t.Context(), "a")
			l.ReleaseLocks(t.Context(), "b")
		})
	}
}

// TestEIDNarrowLockedRow: it asks again while ctx lasts, and counts from the last send.
func TestEIDNarrowLockedRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{TTL: 6 * time.Second})
		mustLock(t, l, "a", "1", "2")
		db.lock("1")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErrors(t, "AcquireLocks of a locked row", l.AcquireLocks(ctx, "a", "1"), context.DeadlineExceeded)
		wantHolding(t, db, "1:a 2:a")
		time.AfterFunc(3*time.Second, func() { db.lock() })
		failure := &pq.Error{Code: "57P01"}
		db.hook(func(s statement) error {
			if db.renews(s, "1", "2") {
				return failure
			}
			return nil
		}, nil)
		mustLock(t, l, "a", "1")
		start := time.Now()
		db.hook(failing(db.sql.renew, failure), nil)
		<-l.Lost("a")
		if took := time.Since(start); took != 5400*time.Millisecond {
			t.Errorf("lost %v after it was narrowed, want 5.4 s", took)
		}
		l.ReleaseLocks(t.Context(), "a")
		wantEmpty(t, l)
	})
}

// TestEIDNarrow: what is dropped is free at once, for others of this process too;
// the heartbeat goes on with the rest.
func TestEIDNarrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1", "2", "3")
		next := make(chan error, 1)
		go func() { next <- l.AcquireLocks(t.Context(), "b", "1", "3") }()
		synctest.Wait()
		lost := l.Lost("a")
		sent := len(db.statements())
		wantErrors(t, "AcquireLocks of more", l.AcquireLocks(t.Context(), "a", "1", "2", "3", "4"), ErrSetWidened)
		wantErrors(t, "AcquireLocks of others", l.AcquireLocks(t.Context(), "a", "4"), ErrSetWidened)
		if n := len(db.statements()) - sent; n != 0 {
			t.Errorf("%d statements to widen, want none", n)
		}
		mustLock(t, l, "a", "2")
		if err := <-next; err != nil {
			t.Errorf("AcquireLocks of what was dropped = %v", err)
		}
		time.Sleep(time.Hour)
		wantHolding(t, db, "1:b 2:a 3:b")
		if l.Lost("a") != lost || isLost(l, "a") {
			t.Error("the set was lost, or is another, after it was narrowed")
		}
		wantErrors(t, "AcquireLocks of a dropped id", l.AcquireLocks(t.Context(), "a", "1", "2"), ErrSetWidened)
		l.ReleaseLocks(t.Context(), "a")
		wantHolding(t, db, "1:b 3:b")
		l.ReleaseLocks(t.Context(), "b")
		wantEmpty(t, l)
	})
}

// TestEIDNarrowFails: a definite failure leaves the set as it was.
func TestEIDNarrowFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1", "2")
		failure := &pq.Error{Code: "42501"}
		db.hook(failing(db.sql.renew, failure), nil)
		wantErrors(t, "AcquireLocks of fewer", l.AcquireLocks(t.Context(), "a", "2"), failure)
		db.hook(nil, nil)
		time.Sleep(time.Hour)
		wantHolding(t, db, "1:a 2:a")
		mustLock(t, l, "a", "1", "2")
		if n := len(db.of(db.sql.release)); n != 0 || isLost(l, "a") {
			t.Errorf("%d releases, lost %v, want none", n, isLost(l, "a"))
		}
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDNarrowUnknown: if nobody knows whether it was renewed the set stays as it was.
func TestEIDNarrowUnknown(t *testing.T) {
	for _, test := range []struct {
		name          string
		before, after error
		takes         time.Duration
		want          error
	}{
		{"never arrives", driver.ErrBadConn, nil, 0, driver.ErrBadConn},
		{"reply lost", nil, &pq.Error{Code: "57P01"}, 0, nil},
		{"context ends", nil, nil, 3 * time.Second, context.DeadlineExceeded},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, db := newEIDs(t, Config{})
				l := newLocker(t, c, EIDConfig{TTL: time.Hour, AcquireDeadline: 2 * time.Second})
				mustLock(t, l, "a", "1", "2", "3")
				db.hook(func(s statement) error {
					if s.text != db.sql.renew {
						return nil
					}
					time.Sleep(test.takes)
					return test.before
				}, failing(db.sql.renew, test.after))
				err := l.AcquireLocks(t.Context(), "a", "2")
				if err == nil || test.want != nil && !errors.Is(err, test.want) || errors.Is(err, ErrHeld) {
					t.Errorf("AcquireLocks of fewer = %v, want %v", err, test.want)
				}
				db.hook(nil, nil)
				time.Sleep(3 * time.Hour)
				wantHolding(t, db, "1:a 2:a 3:a")
				if n := len(db.of(db.sql.release)); n != 0 || isLost(l, "a") {
					t.Errorf("%d releases, lost %v, want none", n, isLost(l, "a"))
				}
				mustLock(t, l, "a", "1", "2", "3")
				mustLock(t, l, "a", "2")
				wantHolding(t, db, "2:a")
				l.ReleaseLocks(t.Context(), "a")
				wantEmpty(t, l)
			})
		})
	}
}

// TestEIDNarrowFreesLate: once renewed the set is narrowed. What it drops is freed by
// itself if the caller leaves, and others of this process come after that.
func TestEIDNarrowFreesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1", "2", "3")
		db.hook(func(s statement) error {
			if s.text == db.sql.release {
				time.Sleep(3 * time.Second)
			}
			return nil
		}, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if err := l.AcquireLocks(ctx, "a", "2"); err != nil || time.Since(start) != time.Second {
			t.Errorf("AcquireLocks of fewer = %v after %v, want nil after 1 s", err, time.Since(start))
		}
		mustLock(t, l, "b", "1", "3")
		if took := time.Since(start); took < 3*time.Second || took > 4*time.Second {
			t.Errorf("the next had them after %v, want it after the release", took)
		}
		if n := len(db.of(db.sql.acquire)); n != 2 {
			t.Errorf("%d acquisitions, want 2", n)
		}
		wantHolding(t, db, "1:b 2:a 3:b")
		l.ReleaseLocks(t.Context(), "a")
		l.ReleaseLocks(t.Context(), "b")
		wantEmpty(t, l)
	})
}

// TestEIDNarrowBeside: what was sent with all ids, and finds some of them freed, is no
// loss.
func TestEIDNarrowBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1", "2")
		slow := func(s statement) error {
			if db.renews(s, "1", "2") || s.text == db.sql.check && s.args[0].Value == `["1","2"]` {
				time.Sleep(time.Second)
			}
			return nil
		}
		db.hook(slow, nil)
		for len(db.of(db.sql.renew)) == 0 {
			time.Sleep(time.Millisecond)
		}
		asserted := make(chan error, 1)
		go func() { asserted <- l.AssertLocksHeld(t.Context(), "a") }()
		synctest.Wait()
		mustLock(t, l, "a", "1")
		wantHolding(t, db, "1:a")
		if err := <-asserted; err != nil {
			t.Errorf("AssertLocksHeld = %v", err)
		}
		time.Sleep(time.Minute)
		if isLost(l, "a") {
			t.Error("the set is lost")
		}
		wantHolding(t, db, "1:a")
		if n := len(db.of(db.sql.check)); n != 2 {
			t.Errorf("%d checks, want the second with what is left", n)
		}
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDCheckFails: an error of the database is not a loss.
func TestEIDCheckFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1")
		failure := &pq.Error{Code: "57P01"}
		db.hook(failing(db.sql.check, failure), nil)
		err := l.AssertLocksHeld(t.Context(), "a")
		wantErrors(t, "AssertLocksHeld", err, failure)
		if want := "coord: assert locks of a: "; err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("AssertLocksHeld = %v, want %q before it", err, want)
		}
		if isLost(l, "a") {
			t.Error("a check that failed has lost the set")
		}
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDClose: every anchor is released, who waits ends, and nothing goes after.
func TestEIDClose(t *testing.T) {
	for name, end := range map[string]func(*Coord, *EIDLocker) error{
		"EIDLocker.Close": func(_ *Coord, l *EIDLocker) error { return l.Close() },
		"Coord.Close":     func(c *Coord, _ *EIDLocker) error { return c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, db := newEIDs(t, Config{})
				l := newLocker(t, c, EIDConfig{TTL: time.Hour})
				mustLock(t, l, "a", "1", "2")
				mustLock(t, l, "b", "3")
				db.take("4", time.Hour)
				lost := l.Lost("a")
				start := time.Now()
				var wg sync.WaitGroup
				for _, wait := range []struct{ anchor, id string }{{"c", "1"}, {"d", "4"}, {"d", "5"}} {
					wg.Go(func() {
						wantErrors(t, "AcquireLocks", l.AcquireLocks(t.Context(), wait.anchor, wait.id), ErrClosed, ErrHeld)
					})
					synctest.Wait()
				}
				if err := end(c, l); err != nil || time.Since(start) != 0 {
					t.Errorf("%s = %v after %v, want nil at once", name, err, time.Since(start))
				}
				wg.Wait()
				wantHolding(t, db, "4:x")
				wantEmpty(t, l)
				select {
				case <-lost:
					t.Error("Lost is closed by a release")
				default:
				}
				sent := len(db.statements())
				wantErrors(t, "AcquireLocks", l.AcquireLocks(t.Context(), "e", "9"), ErrClosed)
				wantErrors(t, "AssertLocksHeld", l.AssertLocksHeld(t.Context(), "a"), ErrClosed)
				wantErrors(t, "Guard", l.Guard(t.Context(), &sql.Tx{}, "a"), ErrClosed)
				l.ReleaseLocks(t.Context(), "a")
				if l.Lost("a") != nil {
					t.Error("Lost is not nil after Close")
				}
				if err := errors.Join(end(c, l), l.Close(), c.Close()); err != nil {
					t.Errorf("the second %s = %v", name, err)
				}
				if n := len(db.statements()) - sent; n != 0 || len(c.parts) != 1 {
					t.Errorf("%d statements after Close, %d parts kept, want none, and the session", n, len(c.parts))
				}
				if _, err := c.EIDLocker(EIDConfig{}); !errors.Is(err, ErrClosed) {
					t.Errorf("EIDLocker after Close = %v, want ErrClosed", err)
				}
			})
		})
	}
}

// TestEIDCloseDuringAGrant: what is granted just then is released too, or undone.
func TestEIDCloseDuringAGrant(t *testing.T) {
	for _, ofCoord := range []bool{false, true} {
		for closed := range 5 * time.Millisecond {
			if closed%time.Millisecond != 0 {
				continue
			}
			synctest.Test(t, func(t *testing.T) {
				c, db := newEIDs(t, Config{})
				l := newLocker(t, c, EIDConfig{TTL: time.Hour})
				db.hook(func(s statement) error { time.Sleep(time.Millisecond); return nil },
					func(s statement) error { time.Sleep(time.Millisecond); return nil })
				var wg sync.WaitGroup
				for i := range 8 {
					wg.Go(func() {
						for n := range 3 {
							err := l.AcquireLocks(t.Context(), fmt.Sprint("a", i), fmt.Sprint(i), fmt.Sprint(i+1))
							if err != nil && !errors.Is(err, ErrClosed) {
								t.Errorf("AcquireLocks = %v, want nil or ErrClosed", err)
							}
							if n == 1 {
								l.ReleaseLocks(t.Context(), fmt.Sprint("a", i))
							}
						}
					})
				}
				time.Sleep(closed)
				l.Close()
				if ofCoord {
					c.Close()
				}
				wg.Wait()
				time.Sleep(time.Minute)
				wantHolding(t, db, "")
				wantEmpty(t, l)
			})
		}
	}
}

// TestEIDCloseOfAStuckDriver takes 5 s.
func TestEIDCloseOfAStuckDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		for i := range 3 {
			mustLock(t, l, fmt.Sprint("a", i), fmt.Sprint(i))
		}
		back := make(chan struct{})
		db.hook(func(statement) error { <-back; return nil }, nil)
		go l.AcquireLocks(t.Context(), "b", "9")
		synctest.Wait()
		start := time.Now()
		l.Close()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("Close took %v, want 5 s", took)
		}
		close(back)
		time.Sleep(time.Minute)
	})
}

// TestEIDFirstComeFirstServed among the calls whose ids are all free. A call that waits for
// one of its ids does not keep others from the rest.
func TestEIDFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{AcquireDeadline: time.Hour})
		mustLock(t, l, "first", "1", "2")
		var mu sync.Mutex
		var order []string
		for _, waiter := range []string{"a:1", "b:1,2", "gives up:2", "c:2,3", "d:3", "e:1"} {
			go func() {
				anchor, ids, _ := strings.Cut(waiter, ":")
				ctx := t.Context()
				if anchor == "gives up" {
					timed, cancel := context.WithTimeout(ctx, time.Minute)
					defer cancel()
					ctx = timed
				}
				if l.AcquireLocks(ctx, anchor, strings.Split(ids, ",")...) != nil {
					return
				}
				mu.Lock()
				order = append(order, anchor)
				mu.Unlock()
				time.Sleep(10 * time.Minute)
				l.ReleaseLocks(ctx, anchor)
			}()
			synctest.Wait()
		}
		mustLock(t, l, "apart", "4")
		l.ReleaseLocks(t.Context(), "apart")
		time.Sleep(2 * time.Minute)
		mu.Lock()
		if want := []string{"d"}; !slices.Equal(order, want) { // Its id is free, though c waits for it too.
			t.Errorf("%v have got through before the release, want %v", order, want)
		}
		mu.Unlock()
		l.ReleaseLocks(t.Context(), "first")
		time.Sleep(40 * time.Minute)
		mu.Lock()
		defer mu.Unlock()
		// When a is done, c has 2, and so it is e's turn before b's.
		if want := []string{"d", "a", "c", "e", "b"}; !slices.Equal(order, want) {
			t.Errorf("order = %v, want %v", order, want)
		}
		time.Sleep(time.Hour)
		wantEmpty(t, l)
	})
}

// TestEIDThousandContenders cost the database one statement at a time.
func TestEIDThousandContenders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{AcquireDeadline: time.Hour})
		inFlight, most, granted := 0, 0, 0
		var mu sync.Mutex
		db.hook(func(s statement) error {
			mu.Lock()
			inFlight++
			most = max(most, inFlight)
			mu.Unlock()
			time.Sleep(time.Millisecond)
			return nil
		}, func(statement) error {
			mu.Lock()
			defer mu.Unlock()
			inFlight--
			return nil
		})
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				anchor := fmt.Sprint("a", i)
				if err := l.AcquireLocks(t.Context(), anchor, "1", "2"); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				granted++
				mu.Unlock()
				l.ReleaseLocks(t.Context(), anchor)
			})
		}
		wg.Wait()
		if sent := len(db.statements()); most != 1 || granted != 1000 || sent != 2000 {
			t.Errorf("%d of 1000 were granted by %d statements, %d at once, want 2000, 1 at once", granted, sent, most)
		}
		wantEmpty(t, l)
	})
}

// TestEIDSameAnchorAtOnce: the second call finds what the first has locked.
func TestEIDSameAnchorAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		db.hook(func(statement) error { time.Sleep(time.Second); return nil }, nil)
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { mustLock(t, l, "a", "1", "2") })
		}
		wg.Go(func() {
			time.Sleep(time.Millisecond)
			wantErrors(t, "AcquireLocks", l.AcquireLocks(t.Context(), "a", "3"), ErrSetWidened)
		})
		wg.Wait()
		if n, m := len(db.of(db.sql.acquire)), len(db.of(db.sql.renew)); n != 1 || m != 4 {
			t.Errorf("%d acquisitions and %d renewals, want 1 and 4", n, m)
		}
		l.ReleaseLocks(t.Context(), "a")
		wantHolding(t, db, "")
	})
}

// TestEIDLostReply: what may have been granted is freed in the background, by the
// attempt; one that database/sql sends again finds its own grant.
func TestEIDLostReply(t *testing.T) {
	for _, lost := range []int{1, 1000} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			l := newLocker(t, c, EIDConfig{TTL: time.Hour})
			db.hook(nil, failingTimes(lost, db.sql.acquire, driver.ErrBadConn))
			err := l.AcquireLocks(t.Context(), "a", "1", "2")
			sent := db.of(db.sql.acquire)
			for _, s := range sent {
				if s.args[5].Value != sent[0].args[5].Value {
					t.Error("what was sent again has another attempt")
				}
			}
			time.Sleep(time.Minute)
			if lost == 1 {
				if err != nil || len(sent) != 2 {
					t.Errorf("AcquireLocks = %v after %d statements, want nil after 2", err, len(sent))
				}
				wantHolding(t, db, "1:a 2:a")
				if err := l.AssertLocksHeld(t.Context(), "a"); err != nil {
					t.Errorf("AssertLocksHeld = %v", err)
				}
				l.ReleaseLocks(t.Context(), "a")
				return
			}
			wantErrors(t, "AcquireLocks", err, driver.ErrBadConn)
			wantHolding(t, db, "")
			for _, s := range db.of(db.sql.undo) {
				if s.args[0].Value != `["1","2"]` || s.args[1].Value != sent[0].args[5].Value {
					t.Errorf("undone %v, want attempt %v", s.args, sent[0].args[5].Value)
				}
			}
			wantEmpty(t, l)
		})
	}
}

// TestEIDLostAnchorOnAStuckDriver: the release of what it has lost is not waited for
// longer than the context lasts.
func TestEIDLostAnchorOnAStuckDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1")
		back := make(chan struct{})
		db.hook(func(statement) error { <-back; return nil }, nil)
		<-l.Lost("a")
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErrors(t, "AcquireLocks", l.AcquireLocks(ctx, "a", "1"), context.DeadlineExceeded)
		if took := time.Since(start); took != time.Second {
			t.Errorf("AcquireLocks took %v, want 1 s", took)
		}
		if l.Lost("a") != nil {
			t.Error("Lost is not nil for an anchor that has none any more")
		}
		close(back)
		time.Sleep(time.Minute)
		wantEmpty(t, l)
	})
}

// TestEIDSlowGrant: one that has waited for most of the TTL, or longer, is asked for
// again, or it would be lost at once.
func TestEIDSlowGrant(t *testing.T) {
	for _, takes := range []time.Duration{15 * time.Second, 40 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{Timeout: time.Hour})
			l := newLocker(t, c, EIDConfig{})
			db.hook(func(s statement) error {
				if s.text == db.sql.acquire && len(db.of(db.sql.acquire)) == 1 {
					time.Sleep(takes)
				}
				return nil
			}, nil)
			start := time.Now()
			mustLock(t, l, "a", "1")
			time.Sleep(10 * time.Minute)
			sent := db.of(db.sql.acquire)
			if isLost(l, "a") || len(sent) != 2 || sent[1].at.Sub(start) != takes || sent[0].args[5].Value != sent[1].args[5].Value {
				t.Errorf("lost %v after %d acquisitions, want 2 of one attempt and not lost", isLost(l, "a"), len(sent))
			}
			l.ReleaseLocks(t.Context(), "a")
		})
	}
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{Timeout: time.Minute})
		l := newLocker(t, c, EIDConfig{TTL: time.Second})
		db.hook(func(statement) error { time.Sleep(500 * time.Millisecond); return nil }, nil)
		mustLock(t, l, "a", "1") // It is always that slow, and still better than none.
		if sent := db.of(db.sql.acquire); len(sent) != 10 {
			t.Errorf("%d acquisitions, want 10", len(sent))
		}
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDLostWhileItIsNarrowed: the answer that comes after the loss is none, and the
// locks are acquired afresh.
func TestEIDLostWhileItIsNarrowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1", "2")
		db.hook(failing(db.sql.renew, &pq.Error{Code: "57P01"}), nil)
		lost := l.Lost("a")
		time.Sleep(26 * time.Second)
		db.hook(func(s statement) error {
			if db.renews(s, "1", "2") {
				return &pq.Error{Code: "57P01"}
			}
			return nil
		}, func(s statement) error {
			if s.text == db.sql.renew {
				time.Sleep(2 * time.Second)
			}
			return nil
		})
		mustLock(t, l, "a", "1")
		<-lost
		db.hook(nil, nil)
		time.Sleep(time.Hour)
		if l.Lost("a") == lost || isLost(l, "a") {
			t.Error("AcquireLocks has returned locks that were lost")
		}
		wantHolding(t, db, "1:a")
		l.ReleaseLocks(t.Context(), "a")
		wantEmpty(t, l)
	})
}

// TestEIDStuckCheck: no check or narrowing keeps renewals waiting until the locks are
// lost.
func TestEIDStuckCheck(t *testing.T) {
	for name, call := range map[string]func(*EIDLocker) error{
		"AssertLocksHeld": func(l *EIDLocker) error { return l.AssertLocksHeld(context.Background(), "a") },
		"AcquireLocks":    func(l *EIDLocker) error { return l.AcquireLocks(context.Background(), "a", "1") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, db := newEIDs(t, Config{})
				db.fresh = false
				l := newLocker(t, c, EIDConfig{TTL: 6 * time.Second, Heartbeat: 2 * time.Second})
				mustLock(t, l, "a", "1", "2")
				time.Sleep(1700 * time.Millisecond)
				back := make(chan struct{})
				var stuck atomic.Int64 // the connection of the next statement
				db.hook(func(s statement) error {
					if stuck.CompareAndSwap(0, int64(s.conn)); stuck.Load() == int64(s.conn) {
						<-back
					}
					return nil
				}, nil)
				start := time.Now()
				wantErrors(t, name, call(l), context.DeadlineExceeded)
				if took := time.Since(start); took != 5*time.Second {
					t.Errorf("%s took %v, want 5 s", name, took)
				}
				time.Sleep(time.Minute)
				if isLost(l, "a") {
					t.Error("the locks were lost to a statement that was stuck")
				}
				close(back)
				l.ReleaseLocks(t.Context(), "a")
			})
		})
	}
}

// TestEIDCloseReleasesWhatItCan: a release that is stuck keeps no other from it, and
// one under way is not waited for longer.
func TestEIDCloseReleasesWhatItCan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		for i := range 100 {
			mustLock(t, l, fmt.Sprint("a", i), fmt.Sprint(i))
		}
		back := make(chan struct{})
		db.hook(func(s statement) error {
			if list := s.args[0].Value; list == `["7"]` || list == `["8"]` {
				<-back
			}
			return nil
		}, nil)
		go l.ReleaseLocks(t.Context(), "a7")
		synctest.Wait()
		start := time.Now()
		l.Close()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("Close took %v, want 5 s", took)
		}
		wantHolding(t, db, "7:a7 8:a8")
		close(back)
		time.Sleep(time.Minute)
		wantEmpty(t, l)
	})
}

// TestEIDCloseOfTheCoordIsNoLoss, however long it waits for others first.
func TestEIDCloseOfTheCoordIsNoLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{Timeout: 20 * time.Second})
		l := newLocker(t, c, EIDConfig{TTL: 30 * time.Second, Heartbeat: 2 * time.Second})
		mustLock(t, l, "a", "1")
		lost := l.Lost("a")
		back := make(chan struct{})
		db.answer = func(s statement) (driver.Rows, error) {
			if s.text == c.leases.owners {
				<-back
				return noRows{}, nil
			}
			return db.do(s)
		}
		go c.Leases().Owners(t.Context(), "g")
		synctest.Wait()
		start := time.Now()
		c.Close()
		select {
		case <-lost:
			t.Error("Lost is closed by Close")
		default:
		}
		if time.Since(start) != 20*time.Second {
			t.Errorf("Close took %v, want 20 s", time.Since(start))
		}
		wantHolding(t, db, "")
		close(back)
	})
}

// TestEIDNothingIsRenewedDuringARelease that is stuck, and what narrowing has dropped
// is not tried to be freed for ever.
func TestEIDNothingIsRenewedDuringARelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{TTL: 6 * time.Second, Heartbeat: time.Second})
		mustLock(t, l, "a", "1", "2")
		db.hook(failing(db.sql.release, &pq.Error{Code: "57P01"}), nil)
		l.ReleaseLocks(t.Context(), "a")
		if n := len(db.of(db.sql.renew)); n != 0 {
			t.Errorf("%d renewals during the release, want none", n)
		}
		time.Sleep(time.Minute)
		mustLock(t, l, "a", "1", "2")
		db.hook(failing(db.sql.release, &pq.Error{Code: "57P01"}), nil)
		start := time.Now()
		mustLock(t, l, "a", "1")
		time.Sleep(time.Minute)
		tries := db.of(db.sql.release)
		if took := tries[len(tries)-1].at.Sub(start); took > releaseTime || took < releaseTime-time.Second {
			t.Errorf("the last attempt to free came after %v, want close to %v", took, releaseTime)
		}
		db.hook(nil, nil)
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDReacquiringRenews: it counts as a heartbeat does, from the send.
func TestEIDReacquiringRenews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1", "2")
		fails := failing(db.sql.renew, &pq.Error{Code: "57P01"})
		db.hook(fails, nil)
		time.Sleep(26 * time.Second)
		db.hook(func(s statement) error {
			if db.renews(s, "1") {
				return nil
			}
			return fails(s)
		}, func(s statement) error {
			if s.text == db.sql.renew {
				time.Sleep(500 * time.Millisecond)
				db.hook(fails, nil)
			}
			return nil
		})
		sent := time.Now()
		mustLock(t, l, "a", "1")
		<-l.Lost("a")
		if took := time.Since(sent); took != 27*time.Second {
			t.Errorf("lost %v after the last renewal was sent, want 27 s", took)
		}
		l.ReleaseLocks(t.Context(), "a")
	})
}

// TestEIDRefusedKeepsNobodyWaiting: a set that waits for one id of a dead process keeps no
// other set from ids that are free, directly or through a chain of sets.
func TestEIDRefusedKeepsNobodyWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{AcquireDeadline: 10 * time.Second})
		db.take("dead", time.Hour)
		first := make(chan error, 1)
		go func() { first <- l.AcquireLocks(t.Context(), "first", "dead", "1") }()
		synctest.Wait()
		start := time.Now()
		for i := 1; i <= 4; i++ {
			anchor := fmt.Sprint("a", i)
			mustLock(t, l, anchor, fmt.Sprint(i), fmt.Sprint(i+1))
			l.ReleaseLocks(t.Context(), anchor)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("the chain took %v, want no time", took)
		}
		err := <-first
		wantErrors(t, "AcquireLocks", err, ErrHeld, ErrAcquireTimeout, context.DeadlineExceeded)
		wantHeld(t, err, HeldError{"id dead", "other", start.Add(time.Hour)})
		wantEmpty(t, l)
	})
}

// TestEIDWaiterKeepsNobodyWaiting: a set that waits for an id that this process holds keeps no
// other set from ids that are free.
func TestEIDWaiterKeepsNobodyWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{})
		mustLock(t, l, "a", "1")
		start, waiter := time.Now(), make(chan error, 1)
		go func() { waiter <- l.AcquireLocks(t.Context(), "b", "1", "2") }()
		synctest.Wait()
		mustLock(t, l, "c", "2", "3")
		l.ReleaseLocks(t.Context(), "c")
		if took := time.Since(start); took != 0 {
			t.Errorf("AcquireLocks of free ids took %v, want no time", took)
		}
		l.ReleaseLocks(t.Context(), "a")
		if err := <-waiter; err != nil {
			t.Errorf("AcquireLocks after the release = %v", err)
		}
		l.ReleaseLocks(t.Context(), "b")
		wantEmpty(t, l)
	})
}

// TestEIDThousandRefused: a thousand sets that share an id of another process ask for it as
// one, and each keeps its place: the earliest has the id when it is free.
func TestEIDThousandRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{AcquireMaxBackoff: 100 * time.Millisecond, AcquireDeadline: time.Hour})
		db.take("held", 10*time.Second)
		var mu sync.Mutex
		var order []string
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				anchor := fmt.Sprint("a", i)
				mustLock(t, l, anchor, "held", fmt.Sprint("own", i%10), "z")
				mu.Lock()
				order = append(order, anchor)
				mu.Unlock()
				l.ReleaseLocks(t.Context(), anchor)
			})
			if i == 0 {
				synctest.Wait()
			}
		}
		time.Sleep(10*time.Second - time.Nanosecond)
		if sent := len(db.of(db.sql.acquire)); sent > 200 {
			t.Errorf("%d statements in 10 s, want at most 20 a second", sent)
		}
		wg.Wait()
		if len(order) != 1000 || order[0] != "a0" {
			t.Errorf("%d were locked, the first was %q, want 1000 and a0", len(order), order[0])
		}
		wantEmpty(t, l)
	})
}

// TestEIDRefusedForNoneInParticular: the set keeps no id busy, and pauses all the same. One
// that has a single id keeps that, so that those who want the same do not all ask.
func TestEIDRefusedForNoneInParticular(t *testing.T) {
	for _, ids := range [][]string{{"1", "2"}, {"1"}} {
		synctest.Test(t, func(t *testing.T) {
			c, db := newEIDs(t, Config{})
			c.dialect = contendedDialect{c.dialect}
			l := newLocker(t, c, EIDConfig{})
			db.hook(failing(db.sql.acquire, errRace), nil)
			start, first := time.Now(), make(chan error, 1)
			go func() {
				err := l.AcquireLocks(t.Context(), "a", ids...)
				if took := time.Since(start); took < 50*time.Millisecond {
					t.Errorf("%v: AcquireLocks took %v, want a pause", ids, took)
				}
				l.ReleaseLocks(t.Context(), "a")
				first <- err
			}()
			synctest.Wait()
			db.hook(nil, nil)
			mustLock(t, l, "b", "1")
			if took := time.Since(start); (took > 0) != (len(ids) == 1) {
				t.Errorf("%v: the next caller waited %v", ids, took)
			}
			l.ReleaseLocks(t.Context(), "b")
			if err := <-first; err != nil {
				t.Errorf("%v: AcquireLocks = %v", ids, err)
			}
			wantEmpty(t, l)
		})
	}
}

// TestEIDNeverRefused: a wait that ends while the database has not answered yet is no
// contention, though other sets of the process wait for some of the same ids.
func TestEIDNeverRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, db := newEIDs(t, Config{})
		l := newLocker(t, c, EIDConfig{AcquireDeadline: 10 * time.Second})
		db.take("dead", time.Hour)
		go l.AcquireLocks(t.Context(), "a", "dead", "1")
		synctest.Wait()
		db.hook(func(s statement) error {
			if s.text == db.sql.acquire && idsOf(s.args[0])[0] == "1" && len(idsOf(s.args[0])) == 1 {
				time.Sleep(time.Minute)
			}
			return nil
		}, nil)
		err := l.AcquireLocks(t.Context(), "b", "1")
		wantErrors(t, "AcquireLocks", err, context.DeadlineExceeded)
		time.Sleep(5 * time.Minute)
		wantEmpty(t, l)
	})
}
