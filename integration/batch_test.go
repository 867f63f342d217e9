package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// renewTable is the table of id sets, without a Coord that renews what is in it.
type renewTable struct {
	*env
	renew *sql.Stmt
	start time.Time // what rows last from
}

// eachRenewTable runs test on every engine, by the clock that the statement is given.
func eachRenewTable(t *testing.T, test func(*testing.T, *renewTable)) {
	eachEngine(t, func(t *testing.T, e *env) {
		if e.pooler {
			return // Nothing is prepared there.
		}
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		test(t, &renewTable{e, newRaw(t, e).prepare(e, "eidlock.sql", "renew"), e.now(t)})
	})
}

// time is a time after the start, as SQL.
func (r *renewTable) time(after time.Duration) string {
	at := r.start.Add(after).UnixMicro()
	if r.postgres() {
		return fmt.Sprintf("'epoch'::timestamptz + %d * interval '1 microsecond'", at)
	}
	return fmt.Sprint(at)
}

// row makes the row of an id: it carries a token and lasts for a time from the start.
func (r *renewTable) row(t testing.TB, id string, fence int, lasts time.Duration) {
	t.Helper()
	r.exec(t, fmt.Sprintf("INSERT INTO coord_eidlock (eid, owner, anchor, fence, attempt, dated, expires_at) VALUES ('%s', 'o', 'a', %d, 1, %s, %s)",
		id, fence, r.time(0), r.time(lasts)))
}

// askedSet is a set that is to be renewed, for a minute.
type askedSet struct {
	fence int
	ids   []string
}

func set(fence int, ids ...string) askedSet { return askedSet{fence, ids} }

func (s askedSet) String() string { return fmt.Sprint(s.fence, s.ids) }

// ask sends a renewal at a time after the start, and returns "renewed", "locked" or "lost" of
// each set.
func (r *renewTable) ask(t testing.TB, after time.Duration, sets ...askedSet) map[string]string {
	t.Helper()
	list := [][3]any{}
	got := map[string]string{}
	for _, s := range sets {
		list = append(list, [3]any{s.fence, time.Minute.Microseconds(), s.ids})
		got[s.String()] = "lost"
	}
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	rows, err := r.renew.QueryContext(ctx, string(text), r.start.Add(after).UnixMicro())
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var fence int
		var id string
		var renewed bool
		if err := rows.Scan(&fence, &id, &renewed); err != nil {
			t.Fatal(err)
		}
		for _, s := range sets {
			if s.fence == fence && s.ids[0] == id {
				got[s.String()] = map[bool]string{true: "renewed", false: "locked"}[renewed]
			}
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return got
}

// want checks what became of sets that were asked for.
func (r *renewTable) want(t testing.TB, after time.Duration, want map[string]string, sets ...askedSet) {
	t.Helper()
	if got := r.ask(t, after, sets...); !maps.Equal(got, want) {
		t.Errorf("at %v: %v, want %v", after, got, want)
	}
}

// wantLasts checks how long rows last from the start.
func (r *renewTable) wantLasts(t testing.TB, want map[string]time.Duration) {
	t.Helper()
	column := "expires_at"
	if r.postgres() {
		column = "(extract(epoch FROM expires_at) * 1000000)::bigint"
	}
	for _, id := range slices.Sorted(maps.Keys(want)) {
		var expires int64
		r.scan(t, "SELECT "+column+" FROM coord_eidlock WHERE eid = '"+id+"'", &expires)
		if got := time.UnixMicro(expires).Sub(r.start); got != want[id] {
			t.Errorf("%s lasts %v, want %v", id, got, want[id])
		}
	}
}

// TestRenewSets: every state of a set, together in one statement. A set is renewed as a whole
// or not at all, and what becomes of one says nothing of another.
func TestRenewSets(t *testing.T) {
	eachRenewTable(t, func(t *testing.T, r *renewTable) {
		const second = time.Second
		for id, row := range map[string]struct {
			fence int
			lasts time.Duration
		}{
			"whole-1": {1, 30 * second}, "whole-2": {1, 31 * second},
			"expired-1": {2, 30 * second}, "expired-2": {2, 10 * second}, // At the very instant.
			"late-1": {3, 30 * second}, "late-2": {3, 9 * second},
			"taken-1": {4, 30 * second}, "taken-2": {5, 30 * second}, "taker-1": {5, 30 * second},
			"narrow-1": {6, 30 * second}, "narrow-2": {6, 30 * second},
			"other-1": {7, 30 * second},
			"single":  {9, 30 * second},
			"equal-1": {10, 30 * second}, "equal-2": {11, 30 * second}, "equal-3": {10, 30 * second},
			"idle": {1, 30 * second},
		} {
			r.row(t, id, row.fence, row.lasts)
		}
		r.exec(t, "INSERT INTO coord_eidlock (eid, owner, anchor, fence, attempt, dated, expires_at) VALUES ('released', 'o', 'a', 8, 1, "+
			r.time(0)+", "+map[bool]string{true: "'epoch'", false: "0"}[r.postgres()]+")")
		sets := []askedSet{
			set(1, "whole-1", "whole-2"), set(2, "expired-1", "expired-2"), set(3, "late-1", "late-2"),
			set(4, "taken-1", "taken-2"), set(5, "taken-2", "taker-1"), // They share an id.
			set(6, "narrow-1"), set(8, "other-1"), set(8, "released"), set(9, "missing", "single"), set(12, "missing"),
			set(10, "equal-1", "equal-2"), set(10, "equal-3"), // They share a token.
		}
		want := map[string]string{
			"1 [whole-1 whole-2]": "renewed", "2 [expired-1 expired-2]": "lost", "3 [late-1 late-2]": "lost",
			"4 [taken-1 taken-2]": "lost", "5 [taken-2 taker-1]": "renewed",
			"6 [narrow-1]": "renewed", "8 [other-1]": "lost", "8 [released]": "lost", "9 [missing single]": "lost", "12 [missing]": "lost",
			"10 [equal-1 equal-2]": "lost", "10 [equal-3]": "renewed",
		}
		r.want(t, 10*second, want, sets...)
		renewed, lasts := 70*second, map[string]time.Duration{
			"whole-1": 70 * second, "whole-2": 70 * second, "expired-1": 30 * second, "expired-2": 10 * second, "late-1": 30 * second, "late-2": 9 * second,
			"taken-1": 30 * second, "taken-2": 70 * second, "taker-1": 70 * second, "narrow-1": 70 * second, "narrow-2": 30 * second, "other-1": 30 * second,
			"single": 30 * second, "equal-1": 30 * second, "equal-2": 30 * second, "equal-3": 70 * second, "idle": 30 * second,
		}
		r.wantLasts(t, lasts)

		// One that was sent earlier and arrives later finds them held, and changes nothing.
		slices.Reverse(sets)
		want["2 [expired-1 expired-2]"] = "renewed" // It was, then.
		r.want(t, 9*second, want, sets...)
		lasts["expired-1"], lasts["expired-2"] = 69*second, 69*second
		r.wantLasts(t, lasts)
		for id, last := range lasts {
			if last == renewed {
				lasts[id] = 75 * second
			}
		}
		delete(want, "2 [expired-1 expired-2]")
		r.want(t, 15*second, want, slices.DeleteFunc(sets, func(s askedSet) bool { return s.fence == 2 })...)
		r.wantLasts(t, lasts)
		if got := r.ask(t, 15*second); len(got) != 0 {
			t.Errorf("no sets: %v, want none", got)
		}
	})
}

// TestRenewLockedSets: a row that another transaction has locked leaves its set as it is, and
// holds up no other set. A guard's lock is none.
func TestRenewLockedSets(t *testing.T) {
	eachRenewTable(t, func(t *testing.T, r *renewTable) {
		if !r.postgres() {
			return // No row is ever locked there.
		}
		const second = time.Second
		for i, name := range []string{"free", "locked", "expired", "short", "guarded", "taken"} {
			r.row(t, name+"-1", i+1, 30*second)
			r.row(t, name+"-2", i+1, 30*second)
		}
		r.exec(t, "UPDATE coord_eidlock SET expires_at = "+r.time(5*second)+" WHERE eid IN ('expired-2', 'short-1')")
		sets := []askedSet{
			set(1, "free-1", "free-2"), set(2, "locked-1", "locked-2"), set(3, "expired-1", "expired-2"), set(4, "short-1", "short-2"),
			set(5, "guarded-1", "guarded-2"), set(6, "taken-1", "taken-2"),
		}
		tx, err := r.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		_, err = tx.Exec("SELECT FROM coord_eidlock WHERE eid IN ('locked-2', 'expired-2', 'short-2') ORDER BY eid FOR NO KEY UPDATE")
		_, guarded := tx.Exec("SELECT FROM coord_eidlock WHERE fence = 5 ORDER BY eid FOR KEY SHARE")
		_, taken := tx.Exec("UPDATE coord_eidlock SET fence = 7 WHERE eid = 'taken-1'") // Nobody knows yet.
		if err := errors.Join(err, guarded, taken); err != nil {
			t.Fatal(err)
		}
		lasts := map[string]time.Duration{
			"free-1": 70 * second, "free-2": 70 * second, "locked-1": 30 * second, "locked-2": 30 * second, "expired-1": 30 * second,
			"expired-2": 5 * second, "short-1": 5 * second, "short-2": 30 * second, "guarded-1": 70 * second, "guarded-2": 70 * second,
			"taken-1": 30 * second, "taken-2": 30 * second,
		}
		r.want(t, 10*second, map[string]string{
			"1 [free-1 free-2]": "renewed", "2 [locked-1 locked-2]": "locked", "3 [expired-1 expired-2]": "lost", "4 [short-1 short-2]": "lost",
			"5 [guarded-1 guarded-2]": "renewed", "6 [taken-1 taken-2]": "locked",
		}, sets...)
		r.wantLasts(t, lasts)
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		r.want(t, 11*second, map[string]string{
			"1 [free-1 free-2]": "renewed", "2 [locked-1 locked-2]": "renewed", "3 [expired-1 expired-2]": "lost", "4 [short-1 short-2]": "lost",
			"5 [guarded-1 guarded-2]": "renewed", "6 [taken-1 taken-2]": "lost",
		}, sets...)
	})
}

// growsEvenly checks that ten times as much takes some ten times as long, and not a hundred times,
// as when each is compared with each. One pair of measurements that shows it is enough: the machine
// may have paused in another.
func growsEvenly(t *testing.T, name string, n int, do func(n int)) {
	t.Helper()
	measure := func(n int) time.Duration {
		start := time.Now()
		do(n)
		return time.Since(start)
	}
	var few, many time.Duration
	for range 5 {
		if few, many = measure(n/10), measure(n); many < 33*few {
			return
		}
	}
	t.Errorf("%s: %v for %d, %v for %d", name, few, n/10, many, n)
}

// TestRenewLargeSets: neither many sets nor a large one take long, also if every set misses a
// row.
func TestRenewLargeSets(t *testing.T) {
	eachRenewTable(t, func(t *testing.T, r *renewTable) {
		const n = 5000
		all := manyIDs(n)
		list, err := json.Marshal(all)
		if err != nil {
			t.Fatal(err)
		}
		ids := "json_each($1)"
		if r.postgres() {
			ids = "jsonb_array_elements_text($1::jsonb)"
		}
		r.exec(t, "INSERT INTO coord_eidlock (eid, owner, anchor, fence, attempt, dated, expires_at) SELECT value, 'o', 'a', 1, 1, "+
			r.time(0)+", "+r.time(time.Minute)+" FROM "+ids, string(list))
		ask := func(state string, sets ...askedSet) {
			for s, got := range r.ask(t, time.Second, sets...) {
				if got != state {
					t.Fatalf("%.40s is %s, want %s", s, got, state)
				}
			}
		}
		inTens := func(n int, more ...string) (sets []askedSet) {
			for ids := range slices.Chunk(all[:n], 10) {
				sets = append(sets, set(1, append(slices.Clone(ids), more...)...))
			}
			return sets
		}
		growsEvenly(t, "many sets", n, func(n int) { ask("renewed", inTens(n)...) })
		growsEvenly(t, "many sets that miss a row", n, func(n int) { ask("lost", inTens(n, "missing")...) })
		growsEvenly(t, "one set", n, func(n int) { ask("renewed", set(1, all[:n]...)) })
	})
}

// TestRenewManyMutexes: one statement for 10,000 mutexes does not take long either.
func TestRenewManyMutexes(t *testing.T) {
	eachRenewTable(t, func(t *testing.T, r *renewTable) {
		const n = 10000
		names := manyIDs(n)
		locks := func(n int) string {
			var list [][3]any
			for i, name := range names[:n] {
				list = append(list, [3]any{name, i + 1, time.Minute.Microseconds()})
			}
			text, err := json.Marshal(list)
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		rows := "SELECT value ->> 0, 'o', value ->> 1, 1, " + r.time(0) + ", " + r.time(time.Minute) + " FROM json_each($1)"
		if r.postgres() {
			rows = "SELECT value ->> 0, 'o', (value ->> 1)::bigint, 1, " + r.time(0) + ", " + r.time(time.Minute) + " FROM jsonb_array_elements($1::jsonb)"
		}
		r.exec(t, "INSERT INTO coord_mutex (name, owner, fence, attempt, dated, expires_at) "+rows, locks(n))
		renew := newRaw(t, r.env).prepare(r.env, "mutex.sql", "renew")
		growsEvenly(t, "mutexes", n, func(n int) {
			renewed := 0
			found, err := renew.Query(locks(n), r.start.Add(time.Second).UnixMicro())
			if err != nil {
				t.Fatal(err)
			}
			defer found.Close()
			for found.Next() {
				var name string
				var fence int64
				var ok bool
				if err := found.Scan(&name, &fence, &ok); err != nil || !ok {
					t.Fatalf("%s: renewed %v, %v", name, ok, err)
				}
				renewed++
			}
			if found.Err() != nil || renewed != n {
				t.Errorf("%d renewed, %v, want %d", renewed, found.Err(), n)
			}
		})
	})
}

// tallying is a driver's connector that counts the statements that go through it, prepared or
// not.
type tallying struct {
	driver driver.Driver
	url    string
	sent   *atomic.Int64
}

func (d tallying) Driver() driver.Driver { return d.driver }

func (d tallying) Connect(context.Context) (driver.Conn, error) {
	conn, err := d.driver.Open(d.url)
	if err != nil {
		return nil, err
	}
	return &talliedConn{conn, d.sent}, nil
}

type talliedConn struct {
	driver.Conn
	sent *atomic.Int64
}

func (c *talliedConn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	stmt, err := c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	return &talliedStmt{stmt, c.sent}, nil
}

func (c *talliedConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.sent.Add(1)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

func (c *talliedConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.sent.Add(1)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}

func (c *talliedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

type talliedStmt struct {
	driver.Stmt
	sent *atomic.Int64
}

func (s *talliedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.sent.Add(1)
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

func (s *talliedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.sent.Add(1)
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

// manyHeld is mutexes and sets of ids that one Coord holds, at default settings.
type manyHeld struct {
	mutexes []*coord.Lock
	locker  *coord.EIDLocker
	anchors []string
}

// gather acquires mutexes and sets, by several workers.
func gather(t testing.TB, c *coord.Coord, mutexes, sets, size int) *manyHeld {
	t.Helper()
	driver, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m := newMutex(t, driver, coord.MutexConfig{})
	l, err := c.EIDLocker(coord.EIDConfig{})
	if err != nil {
		t.Fatal(err)
	}
	held := &manyHeld{mutexes: make([]*coord.Lock, mutexes), locker: l, anchors: make([]string, sets)}
	var next atomic.Int64
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < mutexes+sets && !t.Failed(); i = int(next.Add(1)) - 1 {
				var err error
				if i < mutexes {
					held.mutexes[i], err = m.TryLock(t.Context(), fmt.Sprint("mutex-", i))
				} else {
					n, ids := i-mutexes, make([]string, size)
					for j := range ids {
						ids[j] = fmt.Sprint("set-", n, "-", j)
					}
					held.anchors[n] = fmt.Sprint("set-", n)
					err = l.AcquireLocks(t.Context(), held.anchors[n], ids...)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return held
}

// lost returns how many mutexes and sets are lost, as far as their holder knows.
func (h *manyHeld) lost() (mutexes, sets int) {
	for _, lock := range h.mutexes {
		if lock.Err() != nil {
			mutexes++
		}
	}
	for _, anchor := range h.anchors {
		select {
		case <-h.locker.Lost(anchor):
			sets++
		default:
		}
	}
	return mutexes, sets
}

// TestManyHeld: what one Coord sends while it holds 10,000 mutexes and 1,000 sets of 5 ids, at
// default settings, and that a network which stalls for 5 s costs it none of them.
func TestManyHeld(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute for each driver")
	}
	const mutexes, sets, size, watched = 10000, 1000, 5, 20 * time.Second
	eachPostgres(t, func(t *testing.T, e *env) {
		p, through := newProxy(t, e)
		var sent atomic.Int64
		db := sql.OpenDB(tallying{e.db.Driver(), through, &sent})
		t.Cleanup(func() { db.Close() })
		db.SetMaxOpenConns(10)
		start := time.Now()
		held := gather(t, newCoord(t, db, e.dialect, coord.Config{}), mutexes, sets, size)
		t.Logf("acquired in %.1f s by %d statements", time.Since(start).Seconds(), sent.Load())

		before, since := sent.Load(), time.Now()
		time.Sleep(watched/2 - 2500*time.Millisecond)
		p.swallow()
		time.Sleep(5 * time.Second)
		p.heal()
		time.Sleep(watched/2 - 2500*time.Millisecond)
		rate := float64(sent.Load()-before) / time.Since(since).Seconds()
		t.Logf("%.1f statements a second to keep them", rate)
		if rate > 5 {
			t.Errorf("%.1f statements a second, want 5 at most", rate)
		}
		if m, s := held.lost(); m+s > 0 {
			t.Errorf("%d mutexes and %d sets are lost", m, s)
		}
		for table, want := range map[string]int{"coord_mutex": mutexes, "coord_eidlock": sets * size} {
			var live int
			e.scan(t, "SELECT count(*) FROM "+table+" WHERE expires_at > clock_timestamp() + interval '5 seconds'", &live)
			if live != want {
				t.Errorf("%d rows of %s last, want %d", live, table, want)
			}
		}
	})
}
