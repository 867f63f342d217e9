package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// locker is one of another process than all before it.
func (e *env) locker(t testing.TB, cfg coord.EIDConfig) *coord.EIDLocker {
	t.Helper()
	l, err := e.coord(t).EIDLocker(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func lockIDs(t testing.TB, l *coord.EIDLocker, anchor string, ids ...string) {
	t.Helper()
	if err := l.AcquireLocks(t.Context(), anchor, ids...); err != nil {
		t.Fatalf("AcquireLocks(%s, %v) = %v", anchor, ids, err)
	}
}

// refusedIDs checks that ids can't be had within a moment.
func refusedIDs(t testing.TB, l *coord.EIDLocker, anchor string, ids ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := l.AcquireLocks(ctx, anchor, ids...); err == nil {
		t.Errorf("AcquireLocks(%s, %v) = nil, want that it is held", anchor, ids)
	}
}

func assertIDs(t testing.TB, l *coord.EIDLocker, anchor string, want error) {
	t.Helper()
	if err := l.AssertLocksHeld(t.Context(), anchor); !errors.Is(err, want) {
		t.Errorf("AssertLocksHeld(%s) = %v, want %v", anchor, err, want)
	}
}

// wantLocked checks which ids are locked, each as "id anchor".
func wantLocked(t testing.TB, e *env, want ...string) {
	t.Helper()
	rows, err := e.db.Query("SELECT eid, anchor FROM coord_eidlock WHERE expires_at > " + e.literal(t) + " ORDER BY eid")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var got []string
	for rows.Next() {
		var id, anchor string
		if err := rows.Scan(&id, &anchor); err != nil {
			t.Fatal(err)
		}
		got = append(got, id+" "+anchor)
	}
	if err := rows.Err(); err != nil || !slices.Equal(got, want) {
		t.Errorf("locked are %v, %v, want %v", got, err, want)
	}
}

// literal is the time by the clock that judges expiry, as SQL.
func (e *env) literal(t testing.TB) string {
	micros := e.now(t).UnixMicro()
	if e.postgres() {
		return fmt.Sprintf("to_timestamp(%d / 1e6)", micros)
	}
	return fmt.Sprint(micros)
}

// expire ends the locks of an anchor, as if its process had died a TTL ago.
func (e *env) expire(t testing.TB, anchor string) {
	t.Helper()
	e.exec(t, "UPDATE coord_eidlock SET expires_at = "+e.literal(t)+" WHERE anchor = '"+anchor+"'")
}

// useLocker calls every operation once.
func useLocker(t *testing.T, l *coord.EIDLocker) {
	t.Helper()
	lockIDs(t, l, "tx", "a", "b", "c")
	lockIDs(t, l, "tx", "a", "b")
	assertIDs(t, l, "tx", nil)
	l.ReleaseLocks(t.Context(), "tx")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestEIDLocks goes through what the operations do in each state.
func TestEIDLocks(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		l, other := e.locker(t, coord.EIDConfig{Owner: " me "}), e.locker(t, coord.EIDConfig{Owner: "other"})
		same := e.locker(t, coord.EIDConfig{Owner: "me"})

		if err := l.AcquireLocks(ctx, "tx"); err != nil {
			t.Errorf("AcquireLocks without ids = %v", err)
		}
		var tables int
		query := "SELECT count(*) FROM sqlite_master WHERE name LIKE 'coord%'"
		if e.postgres() {
			query = "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'coord%'"
		}
		if e.scan(t, query, &tables); tables != 0 {
			t.Errorf("AcquireLocks without ids has made %d tables", tables)
		}
		assertIDs(t, l, "tx", nil)
		l.ReleaseLocks(ctx, "tx")
		if l.Lost("tx") != nil {
			t.Error("Lost of an anchor without locks is not nil")
		}

		lockIDs(t, l, "tx", "b", "a", "b", "c", "a")
		wantLocked(t, e, "a tx", "b tx", "c tx")
		assertIDs(t, l, "tx", nil)
		lost := l.Lost("tx")
		if lost == nil {
			t.Error("Lost of an anchor with locks is nil")
		}

		// All or none, and whoever asks: another owner, this one under another anchor, here and elsewhere.
		refusedIDs(t, other, "tx", "c", "d")
		refusedIDs(t, l, "tx2", "c", "d")
		refusedIDs(t, same, "tx2", "c", "d")
		wantLocked(t, e, "a tx", "b tx", "c tx")
		assertIDs(t, other, "tx", nil)

		lockIDs(t, other, "foreign", "x")
		for _, wider := range [][]string{{"a", "b", "c", "d"}, {"a", "x"}, {"x"}, {"y", "z", "zz"}} {
			if err := l.AcquireLocks(ctx, "tx", wider...); !errors.Is(err, coord.ErrSetWidened) || errors.Is(err, coord.ErrHeld) {
				t.Errorf("AcquireLocks(%v) = %v, want ErrSetWidened", wider, err)
			}
		}
		wantLocked(t, e, "a tx", "b tx", "c tx", "x foreign")

		lockIDs(t, l, "tx", "c", "b", "a")
		lockIDs(t, l, "tx", "c", "a")
		wantLocked(t, e, "a tx", "c tx", "x foreign")
		assertIDs(t, l, "tx", nil)
		lockIDs(t, l, "tx2", "b")
		refusedIDs(t, l, "tx3", "a")
		l.ReleaseLocks(ctx, "tx2")

		// An anchor may be called as an id is.
		lockIDs(t, l, "b", "b", "d")
		wantLocked(t, e, "a tx", "b b", "c tx", "d b", "x foreign")

		gone, cancel := context.WithCancel(ctx)
		cancel()
		l.ReleaseLocks(gone, "b")
		l.ReleaseLocks(ctx, "b")
		other.ReleaseLocks(ctx, "tx") // Not its own.
		wantLocked(t, e, "a tx", "c tx", "x foreign")

		l.ReleaseLocks(ctx, "tx")
		assertIDs(t, l, "tx", nil)
		select {
		case <-lost:
			t.Error("Lost is closed by a release")
		default:
		}
		lockIDs(t, other, "tx", "a", "b", "c", "d")
		if err := other.Close(); err != nil {
			t.Error(err)
		}
		wantLocked(t, e)
		for what, err := range map[string]error{
			"AcquireLocks":    other.AcquireLocks(ctx, "tx", "a"),
			"AssertLocksHeld": other.AssertLocksHeld(ctx, "tx"),
			"Guard":           inTx(t, e.db, nil, func(tx *sql.Tx) error { return other.Guard(ctx, tx, "tx") }),
		} {
			if !errors.Is(err, coord.ErrClosed) {
				t.Errorf("%s after Close = %v, want ErrClosed", what, err)
			}
		}
	})
}

// TestEIDTakeover: what has expired, at the very instant, may be taken, and the one
// who had it finds out. So does one whose owner and anchor come back elsewhere.
func TestEIDTakeover(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		l, other := e.locker(t, coord.EIDConfig{}), e.locker(t, coord.EIDConfig{})
		lockIDs(t, l, "tx", "a", "b", "c")
		e.expire(t, "tx")
		lockIDs(t, other, "tx", "b", "d")
		wantLocked(t, e, "b tx", "d tx")
		l.ReleaseLocks(ctx, "tx") // Lost, though it does not know: what it frees is not theirs.
		wantLocked(t, e, "b tx", "d tx")
		other.ReleaseLocks(ctx, "tx")

		lockIDs(t, l, "tx", "a", "b", "c")
		e.expire(t, "tx")
		lockIDs(t, other, "tx", "b", "d")
		assertIDs(t, l, "tx", coord.ErrLost)
		assertIDs(t, l, "tx", coord.ErrLost)
		<-l.Lost("tx")
		if err := inTx(t, e.db, nil, func(tx *sql.Tx) error { return l.Guard(ctx, tx, "tx") }); !errors.Is(err, coord.ErrLost) {
			t.Errorf("Guard = %v, want ErrLost", err)
		}
		lockIDs(t, l, "tx", "a", "e") // A lost anchor acquires afresh, and more if it likes.
		assertIDs(t, l, "tx", nil)
		wantLocked(t, e, "a tx", "b tx", "d tx", "e tx")
		l.ReleaseLocks(ctx, "tx")
		other.ReleaseLocks(ctx, "tx")

		once, again := e.locker(t, coord.EIDConfig{Owner: "me"}), e.locker(t, coord.EIDConfig{Owner: "me"})
		lockIDs(t, once, "tx", "a", "b")
		lockIDs(t, again, "tx", "a", "c")
		assertIDs(t, again, "tx", nil)
		assertIDs(t, once, "tx", coord.ErrLost)
		once.ReleaseLocks(ctx, "tx")
		wantLocked(t, e, "a tx", "c tx")
	})
}

// TestEIDStatements: what the statements refuse that the library, as a rule, does not
// ask for.
func TestEIDStatements(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		if e.pooler {
			return // Nothing is prepared there.
		}
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		r := newRaw(t, e)
		hour := time.Hour.Microseconds()
		acquire := r.prepare(e, "eidlock.sql", "acquire")
		undo, release := r.prepare(e, "eidlock.sql", "undo"), r.prepare(e, "eidlock.sql", "release")
		var fence int64
		take := func(attempt int64) (granted bool) {
			for range 2 { // The first may make the rows.
				var token int64
				query(t, acquire, []any{&granted, &token, new(string), new(string), new(int64)}, `["a","b"]`, "me", "tx", hour, nil, attempt)
				if granted && token > 0 {
					fence = token
					return true
				}
			}
			return false
		}
		changes := func(stmt *sql.Stmt, args ...any) int64 {
			t.Helper()
			result, err := stmt.Exec(args...)
			if err != nil {
				t.Fatal(err)
			}
			n, _ := result.RowsAffected()
			return n
		}
		const coord1, coord2 = 1 << 32, 2 << 32
		if !take(coord1+2) || take(coord1+1) || !take(coord1+2) || !take(coord2+1) {
			t.Error("an attempt was granted over a later one of its Coord, or was not granted over itself or another Coord's")
		}
		for _, test := range []struct {
			name string
			n    int64
			want int64
		}{
			{"undo of another attempt", changes(undo, `["a","b"]`, int64(coord2+2)), 0},
			{"undo of other ids", changes(undo, `["c"]`, int64(coord2+1)), 0},
			{"release with another token", changes(release, `["a","b"]`, fence-1), 0},
			{"release of other ids", changes(release, `["c"]`, fence), 0},
		} {
			if test.n != test.want {
				t.Errorf("%s changed %d rows, want %d", test.name, test.n, test.want)
			}
		}
		if n := changes(undo, `["a","b"]`, int64(coord2+1)); n != 2 || changes(release, `["a","b"]`, fence) != 0 {
			t.Errorf("undo changed %d rows, want 2, and a release none after it", n)
		}
	})
}

// TestEIDMadeRowsAreFree: the rows of ids that are new are made before they are locked,
// and if another is taken in between, nothing is locked.
func TestEIDMadeRowsAreFree(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		l := e.locker(t, coord.EIDConfig{})
		lockIDs(t, l, "before", "z")
		l.ReleaseLocks(t.Context(), "before")
		e.exec(t, `CREATE FUNCTION rival() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			UPDATE coord_eidlock SET owner = 'rival', anchor = 'rival', expires_at = clock_timestamp() + interval '1 hour' WHERE eid = 'z';
			RETURN NULL;
		END $$`)
		e.exec(t, "CREATE TRIGGER rival AFTER INSERT ON coord_eidlock EXECUTE FUNCTION rival()")
		refusedIDs(t, l, "tx", "a", "b", "z")
		wantLocked(t, e, "z rival")
	})
}

// TestEIDTokensGrow for each id, across release, expiry, takeover and Purge.
func TestEIDTokensGrow(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		lockers := []*coord.EIDLocker{e.locker(t, coord.EIDConfig{}), e.locker(t, coord.EIDConfig{})}
		last := map[string]int64{}
		purger := e.coord(t)
		for round := range 40 {
			anchor := fmt.Sprint("tx", round)
			ids := []string{fmt.Sprint("id", round%3), fmt.Sprint("id", 3+round%2), fmt.Sprint("id", 5+round%5)}
			l := lockers[round%2]
			lockIDs(t, l, anchor, ids...)
			for _, id := range ids {
				var fence int64
				e.scan(t, "SELECT fence FROM coord_eidlock WHERE eid = '"+id+"'", &fence)
				if fence <= last[id] {
					t.Fatalf("round %d: token %d of %s after %d", round, fence, id, last[id])
				}
				last[id] = fence
			}
			if round%4 == 0 {
				e.expire(t, anchor)
				assertIDs(t, l, anchor, coord.ErrLost)
			} else {
				l.ReleaseLocks(ctx, anchor)
			}
			if round%5 == 0 {
				if _, err := purger.Purge(ctx, 0); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// TestEIDPurge: what is locked stays, and what was released or has expired goes.
func TestEIDPurge(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		l := e.locker(t, coord.EIDConfig{})
		lockIDs(t, l, "live", "a", "b")
		lockIDs(t, l, "released", "c", "d", "e")
		lockIDs(t, l, "expired", "f")
		l.ReleaseLocks(t.Context(), "released")
		e.expire(t, "expired")
		for _, test := range []struct {
			age  time.Duration
			want int64
		}{{time.Hour, 3}, {0, 1}, {0, 0}} {
			if n, err := e.coord(t).Purge(t.Context(), test.age); n != test.want || err != nil {
				t.Errorf("Purge(%v) = %d, %v, want %d", test.age, n, err, test.want)
			}
		}
		wantLocked(t, e, "a live", "b live")
		assertIDs(t, l, "live", nil)
	})
}

// TestEIDEnds: how a wait ends, and what it leaves.
func TestEIDEnds(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		holder := e.locker(t, coord.EIDConfig{})
		lockIDs(t, holder, "tx", "held")
		const budget = 700 * time.Millisecond
		cause := errors.New("went home")
		whole := func() (context.Context, func()) { return ctx, func() {} }
		short := func() (context.Context, func()) {
			ctx, cancel := context.WithTimeout(ctx, budget)
			return ctx, cancel
		}
		leaves := func(after time.Duration) func() (context.Context, func()) {
			return func() (context.Context, func()) {
				ctx, cancel := context.WithCancelCause(ctx)
				if after == 0 {
					cancel(cause)
				}
				timer := time.AfterFunc(after, func() { cancel(cause) })
				return ctx, func() { timer.Stop() }
			}
		}
		var wg sync.WaitGroup
		for _, test := range []struct {
			name   string
			caller func() (context.Context, func())
			budget time.Duration
			id     string
			want   []error
			not    []error
			least  time.Duration
		}{
			{"own deadline", whole, budget, "held", []error{coord.ErrHeld, coord.ErrAcquireTimeout, context.DeadlineExceeded}, nil, budget},
			{"caller's deadline", short, 0, "held", []error{coord.ErrHeld, coord.ErrAcquireTimeout, context.DeadlineExceeded}, nil, budget},
			{"cancelled", leaves(budget), 0, "held", []error{coord.ErrHeld, context.Canceled, cause}, []error{coord.ErrAcquireTimeout}, budget},
			{"own deadline on a free id", whole, 1, "free", []error{context.DeadlineExceeded}, []error{coord.ErrHeld, coord.ErrAcquireTimeout}, 0},
			{"cancelled on a free id", leaves(0), 0, "free", []error{context.Canceled, cause}, []error{coord.ErrHeld, coord.ErrAcquireTimeout}, 0},
		} {
			l := e.locker(t, coord.EIDConfig{AcquireDeadline: test.budget})
			wg.Go(func() { // Side by side, since each takes as long as its deadline.
				start := time.Now()
				caller, cancel := test.caller()
				err := l.AcquireLocks(caller, "mine", test.id, "with it")
				cancel()
				took := time.Since(start)
				for _, want := range test.want {
					if !errors.Is(err, want) {
						t.Errorf("%s: AcquireLocks = %v, want %v", test.name, err, want)
					}
				}
				for _, not := range test.not {
					if errors.Is(err, not) {
						t.Errorf("%s: AcquireLocks = %v, want it not to be %v", test.name, err, not)
					}
				}
				if took < test.least || took > 10*time.Second {
					t.Errorf("%s: AcquireLocks took %v, want %v or little more", test.name, took, test.least)
				}
				var held *coord.HeldError
				if errors.Is(err, coord.ErrHeld) && (!errors.As(err, &held) || held.What != "id held" || held.Owner == "" || held.ExpiresAt.IsZero()) {
					t.Errorf("%s: %v tells %+v, want who holds the id", test.name, err, held)
				}
				assertIDs(t, l, "mine", nil)
				l.Close()
			})
		}
		wg.Wait()
		wantLocked(t, e, "held tx")
		assertIDs(t, holder, "tx", nil)
	})
}

// TestEIDUnseen: what is granted after the caller has left is freed.
func TestEIDUnseen(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		db := e.open(t)
		db.SetMaxIdleConns(1) // The one on which the acquisition is prepared: a lock on the table stops a Prepare too.
		l, err := newCoord(t, db, e.dialect, e.config()).EIDLocker(coord.EIDConfig{})
		if err != nil {
			t.Fatal(err)
		}
		lockIDs(t, l, "before", "a", "b")
		l.ReleaseLocks(t.Context(), "before")
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec("LOCK TABLE coord_eidlock"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() { result <- l.AcquireLocks(ctx, "tx", "a", "b") }()
		e.blocked(t, "coord_eidlock", 1)
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) || errors.Is(err, coord.ErrHeld) {
			t.Errorf("AcquireLocks = %v, want context.Canceled alone", err)
		}
		tx.Rollback()
		var granted bool
		eventually(t, "the grant that nobody saw is freed", func() bool {
			e.scan(t, "SELECT bool_or(anchor = 'tx') AND bool_and(expires_at = 'epoch') FROM coord_eidlock WHERE eid IN ('a', 'b')", &granted)
			return granted
		})
		assertIDs(t, l, "tx", nil)
		lockIDs(t, l, "next", "a", "b")
	})
}

// TestEIDCloseDuringAcquire: whenever Close comes, it leaves nothing locked, though the
// server may commit what was cancelled.
func TestEIDCloseDuringAcquire(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		for n := range 80 {
			c, err := coord.New(e.db, e.dialect, coord.Config{})
			if err != nil {
				t.Fatal(err)
			}
			l, err := c.EIDLocker(coord.EIDConfig{TTL: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			lockIDs(t, l, "first", "f") // The table is known, and the statement prepared.
			var wg sync.WaitGroup
			wg.Go(func() { _ = l.AcquireLocks(t.Context(), "tx", fmt.Sprint("a", n), fmt.Sprint("b", n)) })
			time.Sleep(rand.N(4 * time.Millisecond))
			if n%2 == 0 {
				l.Close()
			}
			c.Close()
			wg.Wait()
			wantLocked(t, e)
		}
	})
}

// TestEIDGuard: a takeover asks again until an open guard has ended; renewing, narrowing and
// releasing do not wait for it.
func TestEIDGuard(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		l, other := e.locker(t, coord.EIDConfig{}), e.locker(t, coord.EIDConfig{})
		lockIDs(t, l, "tx", "a", "b", "c")
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if err := l.Guard(ctx, tx, "tx"); err != nil {
			t.Fatal(err)
		}
		lockIDs(t, l, "tx", "a", "b", "c")
		lockIDs(t, l, "tx", "a", "b")
		wantLocked(t, e, "a tx", "b tx")
		l.ReleaseLocks(ctx, "tx")
		wantLocked(t, e)
		refusedIDs(t, other, "tx", "b", "d")
		lockIDs(t, other, "meanwhile", "d") // Nobody waits for the guard with other rows in hand.
		other.ReleaseLocks(ctx, "meanwhile")
		taken := make(chan error, 1)
		go func() { taken <- other.AcquireLocks(ctx, "tx", "b", "d") }()
		e.asksAgain(t, "coord_eidlock", 0)
		select {
		case err := <-taken:
			t.Errorf("AcquireLocks during the guard = %v", err)
		default:
		}
		tx.Commit()
		if err := <-taken; err != nil {
			t.Errorf("AcquireLocks after the guard = %v", err)
		}
	})
	each(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		l := e.locker(t, coord.EIDConfig{})
		guard := func(anchor string) error {
			return inTx(t, e.db, nil, func(tx *sql.Tx) error { return l.Guard(ctx, tx, anchor) })
		}
		if err := guard("tx"); !errors.Is(err, coord.ErrLost) {
			t.Errorf("Guard of an anchor without locks = %v, want ErrLost", err)
		}
		lockIDs(t, l, "tx", "a", "b")
		if err := guard("tx"); err != nil {
			t.Errorf("Guard = %v", err)
		}
		e.exec(t, "UPDATE coord_eidlock SET fence = fence + 1 WHERE eid = 'b'")
		if err := guard("tx"); !errors.Is(err, coord.ErrLost) {
			t.Errorf("Guard with a token that is not ours = %v, want ErrLost", err)
		}
		e.exec(t, "UPDATE coord_eidlock SET fence = fence - 1 WHERE eid = 'b'")
		if err := guard("tx"); err != nil {
			t.Errorf("Guard = %v", err)
		}
		e.expire(t, "tx")
		if err := guard("tx"); !errors.Is(err, coord.ErrLost) {
			t.Errorf("Guard after the expiry = %v, want ErrLost", err)
		}
	})
}

// TestEIDHeartbeat: locks outlive their TTL many times, a failure that passes loses
// nothing, and a row that is gone loses all.
func TestEIDHeartbeat(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		l := e.locker(t, coord.EIDConfig{TTL: 4 * time.Second, Heartbeat: 100 * time.Millisecond})
		lockIDs(t, l, "tx", "a", "b", "c")
		renewed := func() time.Time {
			var micros int64
			query := "SELECT min(dated) FROM coord_eidlock WHERE eid <> ''"
			if e.postgres() {
				query = "SELECT (extract(epoch FROM min(dated)) * 1000000)::bigint FROM coord_eidlock"
			}
			if err := e.db.QueryRow(query).Scan(&micros); err != nil {
				return time.Time{} // Not there just now.
			}
			return time.UnixMicro(micros)
		}
		after := func(what string, at time.Time) {
			eventually(t, "a heartbeat "+what, func() bool { return renewed().After(at) })
		}
		after("comes", renewed())
		e.exec(t, "ALTER TABLE coord_eidlock RENAME TO gone") // Renewals fail.
		time.Sleep(300 * time.Millisecond)                    // Three of them, as a rule: nothing tells.
		e.exec(t, "ALTER TABLE gone RENAME TO coord_eidlock")
		after("comes after failures", e.now(t))
		select {
		case <-l.Lost("tx"):
			t.Error("locks are lost by failures that passed")
		default:
		}
		assertIDs(t, l, "tx", nil)

		e.exec(t, "DELETE FROM coord_eidlock WHERE eid = 'b'")
		<-l.Lost("tx")
		assertIDs(t, l, "tx", coord.ErrLost)
		if got := e.now(t); renewed().After(got) {
			t.Error("what was lost is renewed")
		}
		wantLocked(t, e, "a tx", "c tx") // Until the holder is done with them, or their TTL.
		l.ReleaseLocks(t.Context(), "tx")
		wantLocked(t, e)
	})
}

// TestEIDBlackHole: the holder notices its loss before another can have an id, though
// its driver may hang.
func TestEIDBlackHole(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for run := range 10 { // Side by side, since each takes as long as the TTL.
			wg.Go(func() {
				p, through := newProxy(t, e)
				db, err := sql.Open(e.driver, through)
				if err != nil {
					t.Error(err)
					return
				}
				t.Cleanup(func() { p.close(); db.Close() })
				cfg := coord.EIDConfig{TTL: 3 * time.Second, AcquireBackoff: 10 * time.Millisecond, AcquireMaxBackoff: 50 * time.Millisecond}
				l, err := newCoord(t, db, e.dialect, coord.Config{}).EIDLocker(cfg)
				if err != nil {
					t.Error(err)
					return
				}
				defer l.Close()
				defer p.heal() // Else it tries to release for 5 s.
				id, anchor := fmt.Sprint("id", run), fmt.Sprint("tx", run)
				if err := l.AcquireLocks(t.Context(), anchor, id, id+"'"); err != nil {
					t.Errorf("AcquireLocks = %v", err)
					return
				}
				lost := l.Lost(anchor)
				p.swallow()
				if err := e.locker(t, cfg).AcquireLocks(t.Context(), anchor, id); err != nil {
					t.Errorf("AcquireLocks by another = %v", err)
					return
				}
				select {
				case <-lost:
				default:
					t.Error("the holder has not noticed its loss when another has the id")
				}
				assertIDs(t, l, anchor, coord.ErrLost)
			})
		}
		wg.Wait()
	})
}

// TestEIDManyContenders: a thousand goroutines of one process ask as one.
func TestEIDManyContenders(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		lockIDs(t, e.locker(t, coord.EIDConfig{}), "tx", "id")
		p, through := newProxy(t, e)
		behind := *e
		behind.url = through
		db := behind.open(t)
		l, err := newCoord(t, db, e.dialect, e.config()).EIDLocker(coord.EIDConfig{AcquireMaxBackoff: 100 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		lockIDs(t, l, "first", "another") // Nothing is for the first time now.
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				if err := l.AcquireLocks(ctx, fmt.Sprint("tx", i), "id", fmt.Sprint("own", i)); !errors.Is(err, coord.ErrHeld) {
					t.Errorf("AcquireLocks = %v, want ErrHeld", err)
				}
			})
		}
		before, start := p.trips.Load(), time.Now()
		eventually(t, "it has asked a while", func() bool { return p.trips.Load() >= before+20 })
		took, trips := time.Since(start), p.trips.Load()-before
		if open := db.Stats().OpenConnections; open > 2 {
			t.Errorf("%d connections are open, want one or two", open)
		}
		cancel()
		wg.Wait()
		// A pause is at least half of 100 ms; preparing the statement takes a trip on a connection that is new to it.
		if float64(trips) > 4+20*took.Seconds() {
			t.Errorf("%d statements in %v, want at most 20 a second", trips, took)
		}
	})
	eachEngine(t, func(t *testing.T, e *env) { // And when it is let go, each has it in turn.
		l := e.locker(t, coord.EIDConfig{AcquireDeadline: 5 * time.Minute})
		var now, had atomic.Int64
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				anchor := fmt.Sprint("tx", i)
				if err := l.AcquireLocks(t.Context(), anchor, "id", fmt.Sprint("id", i%7)); err != nil {
					t.Error(err)
					return
				}
				if n := now.Add(1); n > 1 {
					t.Errorf("%d hold the id at once", n)
				}
				had.Add(1)
				now.Add(-1)
				l.ReleaseLocks(t.Context(), anchor)
			})
		}
		wg.Wait()
		if had.Load() != 200 {
			t.Errorf("%d had the id, want 200", had.Load())
		}
		wantLocked(t, e)
	})
}

func TestEIDRefusedWritesNothing(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		lockIDs(t, e.locker(t, coord.EIDConfig{}), "tx", "a", "b", "c")
		rival := e.locker(t, coord.EIDConfig{AcquireBackoff: time.Millisecond, AcquireMaxBackoff: 2 * time.Millisecond})
		refuse := func(d time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			if err := rival.AcquireLocks(ctx, "rival", "b", "new"); !errors.Is(err, coord.ErrHeld) {
				t.Fatalf("AcquireLocks = %v, want ErrHeld", err)
			}
		}
		refuse(100 * time.Millisecond)
		if wal := e.wal(t, func() { refuse(500 * time.Millisecond) }); wal != 0 {
			t.Errorf("refusals wrote %d bytes of WAL, want 0", wal)
		}
	})
}

// TestEIDStaysHOT: acquisitions, renewals and releases, and ten thousand ids in one.
func TestEIDStaysHOT(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		db := e.open(t)
		c := newCoord(t, db, e.dialect, e.config())
		l, err := c.EIDLocker(coord.EIDConfig{})
		if err != nil {
			t.Fatal(err)
		}
		ids := manyIDs(10000)
		const rounds = 6
		for range rounds {
			lockIDs(t, l, "tx", ids...)
			lockIDs(t, l, "tx", ids...)
			l.ReleaseLocks(t.Context(), "tx")
		}
		c.Close()
		db.Close()
		want := int64(3 * rounds * len(ids))
		updates, hot := e.updates(t, "coord_eidlock", want)
		if hot*100 < updates*90 {
			t.Errorf("%d of %d updates were HOT, want 90 %%", hot, updates)
		}
		t.Logf("%d of %d updates were HOT", hot, updates)
	})
}

func manyIDs(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("account-%05d", i)
	}
	return ids
}

// TestEIDMany: ten thousand ids at once, of which all but one are dropped.
func TestEIDMany(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		l, other := e.locker(t, coord.EIDConfig{TTL: 5 * time.Minute}), e.locker(t, coord.EIDConfig{})
		n := 10000
		if underRace && !e.postgres() {
			n = 2000 // SQLite's Go is slow there.
		}
		ids := manyIDs(n)
		lockIDs(t, l, "tx", ids...)
		assertIDs(t, l, "tx", nil)
		if err := inTx(t, e.db, nil, func(tx *sql.Tx) error { return l.Guard(t.Context(), tx, "tx") }); err != nil {
			t.Errorf("Guard = %v", err)
		}
		refusedIDs(t, other, "tx", ids[n-1])
		lockIDs(t, l, "tx", ids[471])
		wantLocked(t, e, ids[471]+" tx")
		lockIDs(t, other, "tx", slices.Concat(ids[:471], ids[472:])...)
		l.ReleaseLocks(t.Context(), "tx")
		other.ReleaseLocks(t.Context(), "tx")
		wantLocked(t, e)
	})
}

const accounts = 60

// transfer is the role of a process whose workers move money between accounts, 8 at
// a time, under locks and a guard, for o.Count milliseconds.
func transfer(o orders, db *sql.DB, c *coord.Coord) error {
	l, err := c.EIDLocker(coord.EIDConfig{AcquireBackoff: 2 * time.Millisecond, AcquireMaxBackoff: 20 * time.Millisecond, AcquireDeadline: 2 * time.Minute})
	if err != nil {
		return err
	}
	const workers = 4
	end := time.Now().Add(time.Duration(o.Count) * time.Millisecond)
	errs := make(chan error, workers)
	var done atomic.Int64
	for w := range workers {
		go func() {
			for i := 0; time.Now().Before(end); i++ {
				if err := move(db, l, fmt.Sprintf("%s-%d-%d", c.Owner(), w, i)); err != nil {
					errs <- err
					return
				}
				done.Add(1)
			}
			errs <- nil
		}()
	}
	var failure error
	for range workers {
		failure = errors.Join(failure, <-errs)
	}
	fmt.Println(done.Load())
	return failure
}

// move is one transfer: it reads eight balances outside its transaction, so that
// only the locks keep another from changing them, and writes them back changed.
func move(db *sql.DB, l *coord.EIDLocker, anchor string) error {
	ctx := context.Background()
	ids := rand.Perm(accounts)[:8]
	var names []string
	for _, id := range ids {
		names = append(names, fmt.Sprintf("account-%02d", id))
	}
	if err := l.AcquireLocks(ctx, anchor, names...); err != nil {
		return err
	}
	defer l.ReleaseLocks(ctx, anchor)
	if err := l.AssertLocksHeld(ctx, anchor); err != nil {
		return err
	}
	balances := make([]int, len(ids))
	for i, id := range ids {
		err := serialized(func() error {
			return db.QueryRowContext(ctx, fmt.Sprint("SELECT balance FROM account WHERE id = ", id)).Scan(&balances[i])
		})
		if err != nil {
			return err
		}
	}
	for i := range balances {
		amount := rand.IntN(10)
		balances[i] -= amount
		balances[(i+1)%len(ids)] += amount
	}
	return serialized(func() error { return store(ctx, db, l, anchor, ids, balances) })
}

// serialized runs what is not coord's again if it has failed to serialize.
func serialized(do func() error) error {
	for {
		err := do()
		var server interface{ SQLState() string }
		if !errors.As(err, &server) || server.SQLState() != "40001" {
			return err
		}
	}
}

// store writes the balances under a guard.
func store(ctx context.Context, db *sql.DB, l *coord.EIDLocker, anchor string, ids, balances []int) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := l.Guard(ctx, tx, anchor); err != nil {
		return err
	}
	for i, id := range ids {
		if _, err := tx.Exec(fmt.Sprintf("UPDATE account SET balance = %d WHERE id = %d", balances[i], id)); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// TestEIDTransfers: 16 workers in 4 processes lose no money, see no deadlock, and leave
// nothing locked, whatever the isolation.
func TestEIDTransfers(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		if e.name == "sqlite-memory" {
			return // It is of one process.
		}
		levels, run := []string{"read committed"}, 2*time.Second
		if e.postgres() && !e.pooler {
			levels = append(levels, "serializable")
			if !underRace {
				run = 10 * time.Second
			}
		}
		e.exec(t, "CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL)")
		for id := range accounts {
			e.exec(t, fmt.Sprintf("INSERT INTO account VALUES (%d, 1000)", id))
		}
		for _, level := range levels {
			t.Run(level, func(t *testing.T) {
				if e.postgres() {
					var name string
					e.scan(t, "SELECT current_database()", &name)
					e.exec(t, fmt.Sprintf("ALTER DATABASE %q SET default_transaction_isolation = '%s'", name, level))
				}
				var moved atomic.Int64
				var wg sync.WaitGroup
				for range 4 {
					p := e.start(t, "transfer", orders{Count: int(run.Milliseconds())})
					wg.Go(func() {
						p.wait(t, func(line string) {
							var n int64
							fmt.Sscan(line, &n)
							moved.Add(n)
						})
					})
				}
				wg.Wait()
				var sum, locked int
				e.scan(t, "SELECT sum(balance) FROM account", &sum)
				e.scan(t, "SELECT count(*) FROM coord_eidlock WHERE expires_at > "+e.literal(t), &locked)
				if sum != 1000*accounts || locked != 0 || moved.Load() == 0 {
					t.Errorf("the balances add up to %d and %d ids are locked after %d transfers, want %d and none", sum, locked, moved.Load(), 1000*accounts)
				}
				t.Logf("%d transfers", moved.Load())
			})
		}
	})
}
