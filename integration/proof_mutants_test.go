package integration

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/history"
)

// mutant is a dialect with a bug in one file.
func mutant(t *testing.T, file string, replace ...string) coord.Dialect {
	d := copyDialect(t, coord.Postgres)
	text := string(d.files[file].Data)
	for i := 0; i < len(replace); i += 2 {
		if strings.Count(text, replace[i]) != 1 {
			t.Fatalf("%s has %q %d times, want once", file, replace[i], strings.Count(text, replace[i]))
		}
		text = strings.Replace(text, replace[i], replace[i+1], 1)
	}
	d.files[file] = &fstest.MapFile{Data: []byte(text)}
	return d
}

// contest is a run of some contenders in this process, until the checker finds
// something wrong or the time is over.
type contest struct {
	*env
	dialect coord.Dialect
	rec     *history.Recorder
}

// contend returns what the checker finds. Every contender has a Coord of its own.
func contend(t *testing.T, e *env, d coord.Dialect, most time.Duration, act func(context.Context, *contest, *coord.Coord, int)) []history.Violation {
	t.Helper()
	var file bytes.Buffer
	run := &contest{e, d, history.NewRecorder(&file)}
	for end := time.Now().Add(most); time.Now().Before(end); {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		var wg sync.WaitGroup
		for i := range 4 {
			c := newCoord(t, e.db, d, e.config())
			wg.Go(func() { act(ctx, run, c, i) })
		}
		wg.Wait()
		cancel()
		events, err := history.Read(bytes.NewReader(file.Bytes()))
		if err != nil {
			t.Fatal(err)
		}
		if wrong := history.Check(events); len(wrong) > 0 {
			return wrong
		}
	}
	return nil
}

func (r *contest) record(kind history.Kind, owner int, key string, token int64, sent time.Duration, until time.Time) {
	e := history.Event{Kind: kind, Primitive: "mutex", Key: key, Owner: fmt.Sprint(owner), Token: token, Sent: sent}
	if !until.IsZero() {
		e.Until = history.Shared(until)
	}
	if err := r.rec.Record(e); err != nil {
		panic(err)
	}
}

// trustRenewals holds locks by the driver alone, goes to sleep, and goes on if a
// renewal says that it still holds its lock, as anybody may who has a driver.
func trustRenewals(ctx context.Context, r *contest, c *coord.Coord, i int) {
	const ttl = 30 * time.Millisecond
	d, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		panic(err)
	}
	for ctx.Err() == nil {
		sent := history.Now()
		lock, err := d.Acquire(ctx, "k", ttl)
		if err != nil {
			pause(ctx, time.Millisecond)
			continue
		}
		r.record(history.Acquire, i, "k", lock.Fence, sent, lock.Deadline)
		pause(ctx, rand.N(2*ttl))
		before := time.Now()
		if ok, err := d.Extend(ctx, lock, ttl); ok && err == nil {
			r.record(history.Renew, i, "k", lock.Fence, 0, before.Add(ttl))
			pause(ctx, ttl/2)
		}
		r.record(history.Release, i, "k", lock.Fence, 0, time.Time{})
		_, _ = d.Release(ctx, lock)
	}
}

// lockAndUnlock does so as fast as it can.
func lockAndUnlock(ctx context.Context, r *contest, c *coord.Coord, i int) {
	d, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		panic(err)
	}
	for ctx.Err() == nil {
		sent := history.Now()
		lock, err := d.Acquire(ctx, "k", time.Minute)
		if err != nil {
			continue
		}
		r.record(history.Acquire, i, "k", lock.Fence, sent, lock.Deadline)
		r.record(history.Release, i, "k", lock.Fence, 0, time.Time{})
		_, _ = d.Release(ctx, lock)
	}
}

// proveLeases is what a process of a proof does with leases.
func proveLeases(ctx context.Context, r *contest, c *coord.Coord, i int) {
	const ttl = 60 * time.Millisecond
	owner := fmt.Sprint("contender ", i)
	a, err := leaseActor(c, r.db, owner, ttl)
	if err != nil {
		panic(err)
	}
	p := &prover{proverOrders{TTL: ttl, Keys: 1}, r.db, r.rec}
	p.act(ctx, primitives[0], a, owner)
}

// TestProofMutants: the checker catches bugs that were put in on purpose, and
// nothing without them. The driver does not matter.
func TestProofMutants(t *testing.T) {
	e := newEnv(t, engineNamed("postgres-pgx"), nil)
	e.db.SetMaxIdleConns(16)
	useMutex(t, e.mutexDriver(t, "table")) // Makes the table.
	fill(t, e)
	for _, test := range []struct {
		name    string
		dialect coord.Dialect
		prepare func(*testing.T, *env)
		act     func(context.Context, *contest, *coord.Coord, int)
		want    history.Wrong
	}{
		{"a renewal by name only", mutant(t, "mutex.sql", "WHERE name = $1::text AND fence = $2::bigint\nAND expires_at > 'epoch';", "WHERE name = $1::text AND $2::bigint > 0\nAND expires_at > 'epoch';"),
			func(*testing.T, *env) {}, trustRenewals, history.Overlap},
		{"a token drawn in VALUES", mutant(t, "mutex.sql", "SELECT $1::text, '', 0, 0, 'epoch', 'epoch'", "SELECT $1::text, '', nextval('\"coord_mutex_fence\"'), 0, 'epoch', 'epoch'", "fence = nextval('\"coord_mutex_fence\"')", "fence = excluded.fence"),
			slowInserts, lockAndUnlock, history.TokenOrder},
		{"a guard that asks for any holder", mutant(t, "lease.sql", "owner = $3::text AND epoch = $4::bigint\n", "$3::text > '' AND $4::bigint > 0\n"),
			func(t *testing.T, e *env) { e.exec(t, proofTables) }, proveLeases, history.StaleWrite},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.prepare(t, e)
			if wrong := contend(t, e, coord.Postgres, time.Second, test.act); wrong != nil {
				t.Errorf("without it: %v", wrong[0])
			}
			expect(t, contend(t, e, test.dialect, 20*time.Second, test.act), test.want)
		})
	}
	t.Run("a deadline counted from the reply", func(t *testing.T) { lateReplies(t, e) })
}

// slowInserts lets time pass between the values of an insert and its lock on the row,
// as a busy server does.
func slowInserts(t *testing.T, e *env) {
	e.exec(t, "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(random() * 0.02); RETURN NEW; END $$")
	e.exec(t, "CREATE TRIGGER slow BEFORE INSERT ON coord_mutex FOR EACH ROW EXECUTE FUNCTION be_slow()")
}

// fill makes the rows: the mutants' are another thing than the first use of a name.
func fill(t *testing.T, e *env) {
	t.Helper()
	d := e.mutexDriver(t, "table")
	lock, err := d.Acquire(t.Context(), "k", time.Minute)
	if err == nil {
		_, err = d.Release(t.Context(), lock)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, wrong []history.Violation, want history.Wrong) {
	t.Helper()
	if len(wrong) == 0 || wrong[0].Wrong != want {
		t.Errorf("found %v, want %s", wrong, want)
		return
	}
	t.Logf("caught: %v", wrong[0])
}

// lateReplies: this bug is in what a holder makes of a reply, so the mutant is the
// holder. Its network delays replies, and it counts the TTL from there.
func lateReplies(t *testing.T, e *env) {
	const ttl, delay = 800 * time.Millisecond, 600 * time.Millisecond
	p, through := newProxy(t, e)
	behind := *e
	behind.url = through
	slow := newCoord(t, behind.open(t), e.dialect, e.config()).Leases()
	quick := e.coord(t).Leases()
	for _, counts := range []struct {
		name  string
		until func(coord.Lease) time.Time
		wrong bool
	}{
		{"from the send", func(l coord.Lease) time.Time { return l.Deadline }, false},
		{"from the reply", func(coord.Lease) time.Time { return time.Now().Add(ttl) }, true},
	} {
		var file bytes.Buffer
		run := &contest{e, e.dialect, history.NewRecorder(&file)}
		acquire := func(s *coord.LeaseStore, owner int) bool {
			sent := history.Now()
			lease, err := s.Acquire(t.Context(), "g", 0, fmt.Sprint(owner), ttl)
			if err == nil {
				run.record(history.Acquire, owner, "g", lease.Epoch, sent, counts.until(lease))
			}
			return err == nil
		}
		if !acquire(slow, 1) { // Prepares the statement.
			t.Fatal("not acquired")
		}
		if _, err := slow.Release(t.Context(), "g", 0, "1"); err != nil {
			t.Fatal(err)
		}
		run.record(history.Release, 1, "g", 0, 0, time.Time{})
		file.Reset()
		p.delay.Store(int64(delay))
		if !acquire(slow, 1) {
			t.Fatal("not acquired")
		}
		p.delay.Store(0)
		eventually(t, "the lease expires", func() bool { return acquire(quick, 2) })
		events, err := history.Read(&file)
		if err != nil {
			t.Fatal(err)
		}
		wrong := history.Check(events)
		if counts.wrong {
			expect(t, wrong, history.Overlap)
		} else if wrong != nil {
			t.Errorf("%s: %v", counts.name, wrong)
		}
		if _, err := quick.Release(t.Context(), "g", 0, "2"); err != nil {
			t.Fatal(err)
		}
	}
}
