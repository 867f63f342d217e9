package integration

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/history"
)

// mutant returns Postgres's dialect with another text for one section of a file.
func mutant(t *testing.T, file, section, text string) coord.Dialect {
	t.Helper()
	d := copyDialect(t, coord.Postgres)
	opening := "-- name: " + section + "\n"
	before, rest, found := strings.Cut(string(d.files[file].Data), opening)
	if !found {
		t.Fatalf("%s has no section %s", file, section)
	}
	if _, after, more := strings.Cut(rest, "-- name: "); more {
		text += "\n-- name: " + after
	}
	d.files[file] = &fstest.MapFile{Data: []byte(before + opening + text)}
	return d
}

// The mutants' sections are complete texts: they do not depend on how the right ones
// are written, only on their parameters and rows.
const (
	// extendByName does not ask for the token.
	extendByName = `
UPDATE coord_mutex
SET expires_at = coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()) + $3::bigint * interval '1 microsecond'
WHERE name = $1::text AND $2::bigint > 0;
`
	// acquireWithValues draws the token before the row is locked.
	acquireWithValues = `
INSERT INTO coord_mutex AS mutex (name, owner, fence, attempt, dated, expires_at)
VALUES ($1::text, $2::text, nextval('"coord_mutex_fence"'), $5::bigint,
    coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()),
    coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()) + $3::bigint * interval '1 microsecond')
ON CONFLICT (name) DO UPDATE
SET owner = excluded.owner, fence = excluded.fence, attempt = excluded.attempt, dated = excluded.dated, expires_at = excluded.expires_at
WHERE mutex.expires_at <= coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp())
RETURNING true, owner, fence, (extract(epoch FROM expires_at) * 1000000)::bigint;
`
	// guardForAnyHolder asks neither for the owner nor for the epoch.
	guardForAnyHolder = `
SELECT true
FROM coord_lease
WHERE group_name = $1::text AND partition = $2::bigint AND $3::text > '' AND $4::bigint > 0
AND expires_at > coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp())
FOR KEY SHARE;
`
)

// TestProofMutants checks that the checker catches bugs that were put in on purpose,
// and finds nothing without them. Each bug is exposed by one interleaving, which is
// forced step by step: no step depends on how fast the machine is. The driver does not
// matter.
func TestProofMutants(t *testing.T) {
	e := newEnv(t, engineNamed("postgres-pgx"), nil)
	useMutex(t, e.mutexDriver(t, "table")) // Makes the table.
	e.exec(t, proofTables)
	for _, test := range []struct {
		name    string
		dialect coord.Dialect
		act     func(*interleaving)
		want    history.Wrong
	}{
		{"a renewal by name only", mutant(t, "mutex.sql", "extend", extendByName), extendAfterTakeover, history.Overlap},
		{"a token drawn in VALUES", mutant(t, "mutex.sql", "acquire", acquireWithValues), acquireInBetween, history.TokenOrder},
		{"a guard that asks for any holder", mutant(t, "lease.sql", "guard", guardForAnyHolder), writeAfterTakeover, history.StaleWrite},
	} {
		t.Run(test.name, func(t *testing.T) {
			if wrong := interleave(t, e, test.name+", right", coord.Postgres, test.act); wrong != nil {
				t.Errorf("without the bug: %v", wrong)
			}
			expect(t, interleave(t, e, test.name+", mutant", test.dialect, test.act), test.want)
		})
	}
	t.Run("a deadline counted from the reply", func(t *testing.T) {
		fromSend := func(l coord.Lease) time.Time { return l.Deadline }
		fromReply := func(coord.Lease) time.Time { return time.Now().Add(takenOver) }
		if wrong := interleave(t, e, "late reply, right", coord.Postgres, replyAfterTakeover(fromSend)); wrong != nil {
			t.Errorf("without the bug: %v", wrong)
		}
		expect(t, interleave(t, e, "late reply, mutant", coord.Postgres, replyAfterTakeover(fromReply)), history.Overlap)
	})
}

func expect(t *testing.T, wrong []history.Violation, want history.Wrong) {
	t.Helper()
	if len(wrong) == 0 || wrong[0].Wrong != want {
		t.Errorf("found %v, want %s", wrong, want)
		return
	}
	t.Logf("caught: %v", wrong[0])
}

const (
	takenOver = 200 * time.Millisecond // the TTL of a hold that expires during the test
	lasting   = time.Hour              // the TTL of one that does not
)

// interleaving is one order of the steps of two holders, a and b, that contend for key.
type interleaving struct {
	*env
	t       *testing.T
	dialect coord.Dialect
	key     string
	rec     *history.Recorder
}

// interleave runs act and returns what the checker finds in its history.
func interleave(t *testing.T, e *env, key string, d coord.Dialect, act func(*interleaving)) []history.Violation {
	t.Helper()
	var file bytes.Buffer
	act(&interleaving{e, t, d, key, history.NewRecorder(&file)})
	events, err := history.Read(&file)
	if err != nil {
		t.Fatal(err)
	}
	return history.Check(events)
}

// holder returns the Coord of a or b. Its sessions have its name.
func (i *interleaving) holder(name string) *coord.Coord {
	i.t.Helper()
	u, err := url.Parse(i.url)
	if err != nil {
		i.t.Fatal(err)
	}
	q := u.Query()
	q.Set("application_name", name)
	u.RawQuery = q.Encode()
	own := *i.env
	own.url = u.String()
	return newCoord(i.t, own.open(i.t), i.dialect, i.config())
}

// driver returns the driver of a or b, which has acquired and released the key once:
// its next acquisition is no first use.
func (i *interleaving) driver(name string) *coord.TableDriver {
	i.t.Helper()
	d, err := i.holder(name).TableDriver(coord.DriverConfig{})
	if err != nil {
		i.t.Fatal(err)
	}
	lock, err := d.Acquire(i.t.Context(), i.key, lasting)
	if err == nil {
		_, err = d.Release(i.t.Context(), lock)
	}
	if err != nil {
		i.t.Fatal(err)
	}
	return d
}

// record appends an event that ends now. The times sent and until may be zero.
func (i *interleaving) record(kind history.Kind, owner string, token int64, sent time.Duration, until time.Time) {
	e := history.Event{Kind: kind, Primitive: "mutant", Key: i.key, Owner: owner, Token: token, Sent: sent}
	if !until.IsZero() {
		e.Until = history.Shared(until)
	}
	if err := i.rec.Record(e); err != nil {
		i.t.Error(err)
	}
}

// lock acquires the key for owner and records it. It reports false if the key is held.
func (i *interleaving) lock(d *coord.TableDriver, owner string, ttl time.Duration) (coord.DriverLock, bool) {
	sent := history.Now()
	lock, err := d.Acquire(i.t.Context(), i.key, ttl)
	if err != nil {
		if !errors.Is(err, coord.ErrHeld) {
			i.t.Errorf("Acquire of %s = %v", owner, err)
		}
		return lock, false
	}
	i.record(history.Acquire, owner, lock.Fence, sent, lock.Deadline)
	return lock, true
}

// lease acquires partition 0 of the group that is called like the key.
func (i *interleaving) lease(s *coord.LeaseStore, owner string, ttl time.Duration, until func(coord.Lease) time.Time) (coord.Lease, bool) {
	sent := history.Now()
	lease, err := s.Acquire(i.t.Context(), i.key, 0, owner, ttl)
	if err != nil {
		if !errors.Is(err, coord.ErrHeld) {
			i.t.Errorf("Acquire of %s = %v", owner, err)
		}
		return lease, false
	}
	i.record(history.Acquire, owner, lease.Epoch, sent, until(lease))
	return lease, true
}

func deadline(l coord.Lease) time.Time { return l.Deadline }

// extendAfterTakeover: a's lock expires, b takes it over, and a extends it.
func extendAfterTakeover(i *interleaving) {
	a, b := i.driver("a"), i.driver("b")
	stale, ok := i.lock(a, "a", takenOver)
	if !ok {
		i.t.Fatal("a: not acquired")
	}
	eventually(i.t, "b takes over", func() bool { _, ok := i.lock(b, "b", lasting); return ok })
	sent := time.Now()
	ok, err := a.Extend(i.t.Context(), stale, lasting)
	switch {
	case err != nil:
		i.t.Error(err)
	case ok:
		i.record(history.Renew, "a", stale.Fence, 0, sent.Add(lasting))
	default:
		i.record(history.Lost, "a", stale.Fence, 0, time.Time{})
	}
}

// writeAfterTakeover: a's lease expires, b takes it over, and a writes under its guard.
func writeAfterTakeover(i *interleaving) {
	a, b := i.holder("a").Leases(), i.holder("b").Leases()
	stale, ok := i.lease(a, "a", takenOver, deadline)
	if !ok {
		i.t.Fatal("a: not acquired")
	}
	eventually(i.t, "b takes over", func() bool { _, ok := i.lease(b, "b", lasting, deadline); return ok })
	sent := history.Now()
	err := i.write(a, stale)
	switch {
	case errors.Is(err, coord.ErrLost):
		i.record(history.Refused, "a", stale.Epoch, sent, time.Time{})
	case err != nil:
		i.t.Error(err)
	default:
		i.record(history.Write, "a", stale.Epoch, sent, time.Time{})
	}
}

// write commits a row under the guard of a lease.
func (i *interleaving) write(s *coord.LeaseStore, lease coord.Lease) error {
	tx, err := i.db.BeginTx(i.t.Context(), nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := s.Guard(i.t.Context(), tx, lease); err != nil {
		return err
	}
	if err := logWrite(i.t.Context(), tx, "lease", i.key, lease.Owner, lease.Epoch, "write"); err != nil {
		return err
	}
	return tx.Commit()
}

// gate stops a's sessions before they write a row of mutexes, when its values have
// been computed already, for as long as another session has the advisory lock 1.
const gate = `
CREATE OR REPLACE FUNCTION pass_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	IF current_setting('application_name') = 'a' THEN PERFORM pg_advisory_xact_lock_shared(1); END IF;
	RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER gate BEFORE INSERT OR UPDATE ON coord_mutex FOR EACH ROW EXECUTE FUNCTION pass_gate()`

// acquireInBetween: a's acquisition stops at the gate, b acquires and releases if it
// can, and a's acquisition goes on.
func acquireInBetween(i *interleaving) {
	i.exec(i.t, gate)
	a, b := i.driver("a"), i.driver("b")
	closed, err := i.db.BeginTx(i.t.Context(), nil)
	if err == nil {
		_, err = closed.ExecContext(i.t.Context(), "SELECT pg_advisory_xact_lock(1)")
	}
	if err != nil {
		i.t.Fatal(err)
	}
	defer closed.Rollback()
	first := i.lockAndUnlock(a, "a")
	i.endOrBlock("a", first)
	var free bool // In the right dialect a may have locked the row: then b tries until the gate opens.
	i.scan(i.t, "SELECT count(*) > 0 FROM (SELECT FROM coord_mutex WHERE name = '"+i.key+"' FOR UPDATE SKIP LOCKED) AS row", &free)
	second := i.lockAndUnlock(b, "b")
	if free {
		i.endOrBlock("b", second)
	}
	if err := closed.Rollback(); err != nil {
		i.t.Fatal(err)
	}
	if gotA, gotB := <-first, <-second; !gotA && !gotB {
		i.t.Error("neither was granted")
	}
}

// lockAndUnlock starts to acquire and release the key. The channel has a value once
// that has ended: whether it was granted.
func (i *interleaving) lockAndUnlock(d *coord.TableDriver, owner string) <-chan bool {
	end := make(chan bool, 1)
	go func() {
		lock, ok := i.lock(d, owner, lasting)
		if ok {
			i.record(history.Release, owner, lock.Fence, 0, time.Time{})
			if _, err := d.Release(i.t.Context(), lock); err != nil {
				i.t.Error(err)
			}
		}
		end <- ok
	}()
	return end
}

// endOrBlock waits until what a holder does has ended, or waits for another session.
func (i *interleaving) endOrBlock(name string, end <-chan bool) {
	i.t.Helper()
	eventually(i.t, name+" ends or is blocked", func() (blocked bool) {
		i.scan(i.t, "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND application_name = '"+name+"' AND cardinality(pg_blocking_pids(pid)) > 0", &blocked)
		return blocked || len(end) > 0
	})
}

// replyAfterTakeover: a's lease is granted but the reply is on its way until the lease
// has expired and b has taken it over. This bug is in what a holder makes of a reply:
// until is how long a trusts it.
func replyAfterTakeover(until func(coord.Lease) time.Time) func(*interleaving) {
	return func(i *interleaving) {
		var replies sync.RWMutex
		db := sql.OpenDB(slowReplies{i.db.Driver(), i.url, &replies})
		i.t.Cleanup(func() { db.Close() })
		cfg := i.config()
		cfg.NoPrepare = true
		a, b := newCoord(i.t, db, i.dialect, cfg).Leases(), i.holder("b").Leases()
		_, err := a.Acquire(i.t.Context(), i.key, 0, "a", lasting) // Its next acquisition is no first use.
		if err == nil {
			_, err = a.Release(i.t.Context(), i.key, 0, "a")
		}
		if err != nil {
			i.t.Fatal(err)
		}
		replies.Lock()
		arrive := sync.OnceFunc(replies.Unlock)
		defer arrive()
		end := make(chan bool, 1)
		go func() { _, ok := i.lease(a, "a", takenOver, until); end <- ok }()
		eventually(i.t, "a's lease is granted", func() (granted bool) {
			i.scan(i.t, "SELECT expires_at > 'epoch' FROM coord_lease WHERE group_name = '"+i.key+"'", &granted)
			return granted
		})
		eventually(i.t, "b takes over", func() bool { _, ok := i.lease(b, "b", lasting, deadline); return ok })
		arrive()
		if !<-end {
			i.t.Error("a: not acquired")
		}
	}
}

// slowReplies is a driver whose rows arrive only while nobody has locked replies.
type slowReplies struct {
	driver  driver.Driver
	url     string
	replies *sync.RWMutex
}

func (d slowReplies) Driver() driver.Driver { return d.driver }

func (d slowReplies) Connect(context.Context) (driver.Conn, error) {
	conn, err := d.driver.Open(d.url)
	return slowConn{conn, d.replies}, err
}

type slowConn struct {
	driver.Conn
	replies *sync.RWMutex
}

func (c slowConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
	c.replies.RLock()
	defer c.replies.RUnlock()
	return rows, err
}

func (c slowConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}
