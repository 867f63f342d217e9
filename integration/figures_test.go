package integration

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/history"
	"github.com/seed-4c80c132/coord/integration/picture"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// TestFigures measures what coord costs and writes BENCHMARKS.md and its pictures
// into the directory that COORD_FIGURES names: make figures. The server is one of its
// own, so that nobody else's work is in the figures.
func TestFigures(t *testing.T) {
	dir := os.Getenv("COORD_FIGURES")
	if dir == "" {
		t.Skip("COORD_FIGURES names no directory: make figures")
	}
	if err := os.MkdirAll(filepath.Join(dir, "docs"), 0o755); err != nil {
		t.Fatal(err)
	}
	f := &figures{T: t, dir: dir, cluster: testdb.NewCluster(t)}
	f.say("# Benchmarks\n\nWritten by `make figures` on %s.\n", time.Now().UTC().Format("2 January 2006"))
	f.machine()
	for _, driver := range []string{"pq", "pgx"} {
		f.env = f.database(driver)
		name := map[string]string{"pq": "lib/pq", "pgx": "pgx stdlib"}[driver]
		f.say("## %s\n", name)
		f.costs()
		f.speed()
		f.renewals(name)
	}
	f.pictures()
	f.handOvers()
	f.losses()
	f.memory()
	if err := os.WriteFile(filepath.Join(dir, "BENCHMARKS.md"), f.text.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// figures is the text and what is drawn.
type figures struct {
	*testing.T
	*env
	dir     string
	cluster *testdb.Cluster
	text    bytes.Buffer
	curves  []picture.Line
}

func (f *figures) say(format string, args ...any) { fmt.Fprintf(&f.text, format+"\n", args...) }

// database makes one on the figures' own server.
func (f *figures) database(driver string) *env {
	e := engineNamed("postgres-" + driver)
	admin, err := sql.Open("postgres", f.cluster.URL())
	if err == nil {
		_, err = admin.Exec("CREATE DATABASE " + driver)
	}
	if err != nil {
		f.Fatal(err)
	}
	admin.Close()
	u, err := url.Parse(f.cluster.URL())
	if err != nil {
		f.Fatal(err)
	}
	u.Path = "/" + driver
	env := &env{engine: e, url: u.String()}
	env.db = env.open(f)
	return env
}

// machine says what the figures were measured on.
func (f *figures) machine() {
	f.say("| | |\n|---|---|")
	f.say("| machine | %s, %d cores, %s/%s; client and server share it |", processor(), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
	db, err := sql.Open("postgres", f.cluster.URL())
	if err != nil {
		f.Fatal(err)
	}
	defer db.Close()
	var version string
	if err := db.QueryRow("SHOW server_version").Scan(&version); err != nil {
		f.Fatal(err)
	}
	f.say("| server | PostgreSQL %s, fsync off, over TCP on the loopback |", version)
	f.say("| client | %s, %s, %s |\n", runtime.Version(), module("github.com/lib/pq"), module("github.com/jackc/pgx/v5"))
	f.say("Absolute times are this machine's. What carries over are the round trips, the bytes, and the ratios.\n")
}

func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	_, rest, ok := strings.Cut(string(text), "model name")
	if !ok {
		return "unknown processor"
	}
	name, _, _ := strings.Cut(strings.TrimLeft(rest, "\t: "), "\n")
	return name
}

// module is the version of a dependency. (A test binary does not know.)
func module(path string) string {
	out, _ := exec.Command("go", "list", "-m", path).Output()
	return strings.TrimSpace(string(out))
}

// measured is one operation, and what makes it possible again.
type measured struct {
	name   string
	before func() error // may be nil
	do     func() error
}

// operations are those of all primitives.
func (f *figures) operations(db *sql.DB) []measured {
	ctx, version := context.Background(), int64(0)
	c := newCoord(f, db, f.dialect, f.config())
	d, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		f.Fatal(err)
	}
	leases, res, owner := c.Leases(), c.Reservations(), coord.AggregateRef{ID: "o"}
	list := make([]int, 100)
	for i := range list {
		list[i] = i
		if _, err := leases.Acquire(ctx, "g", i, "o", time.Hour); err != nil {
			f.Fatal(err)
		}
	}
	var lock coord.DriverLock
	acquire := func() error { _, err := leases.Acquire(ctx, "g", 0, "o", time.Hour); return err }
	release := func() error { _, err := leases.Release(ctx, "g", 0, "o"); return err }
	take := func() (err error) { lock, err = d.Acquire(ctx, "m", time.Hour); return err }
	free := func() error { _, err := d.Release(ctx, lock); return err }
	reserve := func() error { _, err := res.Reserve(ctx, proofScope, "k", owner, "h", time.Hour); return err }
	confirm := func() error {
		version++
		_, err := res.Confirm(ctx, proofScope, "k", owner, version)
		return err
	}
	giveUp := func() error { _, err := res.Release(ctx, proofScope, "k", owner, version); return err }
	ids, err := c.EIDLocker(coord.EIDConfig{TTL: time.Hour, AcquireBackoff: time.Minute, AcquireMaxBackoff: time.Minute, AcquireDeadline: 20 * time.Millisecond})
	if err != nil {
		f.Fatal(err)
	}
	set := []string{"a", "b", "c"}
	lock3 := func() error { return ids.AcquireLocks(ctx, "tx", set...) }
	free3 := func() error { ids.ReleaseLocks(ctx, "tx"); return nil }
	refused := func(err error) error {
		if err == nil {
			return fmt.Errorf("granted")
		}
		return nil
	}
	return []measured{
		{"acquire a lease", release, acquire},
		{"acquire a lease that is held", nil, func() error { _, err := leases.Acquire(ctx, "g", 0, "p", time.Hour); return refused(err) }},
		{"renew 1 lease", acquire, func() error { _, err := leases.Renew(ctx, "g", list[:1], "o", time.Hour); return err }},
		{"renew 100 leases", acquire, func() error { _, err := leases.Renew(ctx, "g", list, "o", time.Hour); return err }},
		{"release a lease", acquire, release},
		{"heartbeat of a member", nil, func() error { _, err := c.Members().Heartbeat(ctx, "s", "n", "", time.Hour, nil); return err }},
		{"lock a table mutex", func() error { _ = free(); return nil }, take},
		{"lock one that is held", nil, func() error { _, err := d.Acquire(ctx, "m", time.Hour); return refused(err) }},
		{"extend a table mutex", nil, func() error { _, err := d.Extend(ctx, lock, time.Hour); return err }},
		{"unlock a table mutex", func() error { _ = free(); return take() }, free},
		{"lock 3 ids", free3, lock3},
		{"lock 3 that another has locked", nil, func() error {
			rival, err := c.EIDLocker(coord.EIDConfig{AcquireDeadline: 20 * time.Millisecond})
			if err == nil {
				err = refused(rival.AcquireLocks(ctx, "rival", set...))
				rival.Close()
			}
			return err
		}},
		{"renew 3 ids", lock3, lock3},
		{"release 3 ids", lock3, free3},
		{"reserve a key", func() error { _ = confirm(); return giveUp() }, reserve},
		{"reserve another's", confirm, func() error {
			_, err := res.Reserve(ctx, proofScope, "k", coord.AggregateRef{ID: "p"}, "h", time.Hour)
			return refused(err)
		}},
		{"confirm a key", reserve, confirm},
		{"release a key", confirm, giveUp},
	}
}

// costs are round trips, bytes of WAL, and which updates were HOT.
func (f *figures) costs() {
	p, through := newProxy(f, f.env)
	behind := *f.env
	behind.url = through
	db := behind.open(f)
	db.SetMaxOpenConns(2) // One is pinned, so that the pool has one to prepare on.
	f.say("| operation | round trips | bytes of WAL |\n|---|---:|---:|")
	for _, op := range f.operations(db) {
		var trips, wal []int64
		for range 60 {
			if op.before != nil {
				if err := op.before(); err != nil {
					f.Fatalf("before %s: %v", op.name, err)
				}
			}
			var before, after int64
			f.scan(f, "SELECT pg_current_wal_insert_lsn() - '0/0'", &before)
			began := p.trips.Load()
			if err := op.do(); err != nil {
				f.Fatalf("%s: %v", op.name, err)
			}
			trips = append(trips, p.trips.Load()-began)
			f.scan(f, "SELECT pg_current_wal_insert_lsn() - '0/0'", &after)
			wal = append(wal, after-before)
		}
		f.say("| %s | %d | %d |", op.name, median(trips), median(wal))
	}
	f.say("\nMedians of 60, on the wire and in the log, of rows that are there already. A refused attempt writes nothing.\n")
	f.hot()
}

// hot is the share of HOT updates, once a session has reported what it did.
func (f *figures) hot() {
	f.say("| table | updates | HOT |\n|---|---:|---:|")
	for _, table := range []string{"coord_lease", "coord_member", "coord_mutex", "coord_eidlock", "coord_reservation__proof__thing"} {
		var updates, hot int64
		eventually(f, "the statistics arrive", func() bool {
			f.scan(f, "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = '"+table+"'", &updates, &hot)
			return updates > 50
		})
		f.say("| %s | %d | %.1f %% |", table, updates, 100*float64(hot)/float64(updates))
	}
	f.say("")
}

func median[T int64 | time.Duration](list []T) T {
	list = slices.Clone(list)
	slices.Sort(list)
	return list[len(list)/2]
}

// speed compares with the bare statements, in turns, so that a busy machine slows both
// alike.
func (f *figures) speed() {
	f.exec(f, "TRUNCATE coord_lease") // leasePairs fills it.
	f.say("| one client, one after the other | per second | the bare statements | ratio of the medians |\n|---|---:|---:|---:|")
	for _, p := range slices.Concat(leasePairs(f, f.env), mutexPairs(f, f.env), eidPairs(f, f.env), reservationPairs(f, f.env)) {
		var times [2][]time.Duration
		for end := time.Now().Add(2 * time.Second); len(times[0]) < 20 || len(times[0]) < 2000 && time.Now().Before(end); {
			p.turn(&times)
		}
		mine, bare := median(times[0]), median(times[1])
		f.say("| %s | %.0f | %.0f | %.2f |", p.name, 1/mine.Seconds(), 1/bare.Seconds(), float64(mine)/float64(bare))
	}
	f.say("")
}

// renewals are by how many leases one statement renews.
func (f *figures) renewals(name string) {
	s := f.coord(f).Leases() // Its partitions are there: leasePairs has made them.
	all := make([]int, 10000)
	for i := range all {
		all[i] = i
	}
	curve := picture.Line{Name: name}
	f.say("| partitions in one renewal | leases renewed per second |\n|---:|---:|")
	for _, n := range []int{1, 3, 10, 30, 100, 300, 1000, 3000, 10000} {
		var times []time.Duration
		for end := time.Now().Add(700 * time.Millisecond); len(times) < 10 || time.Now().Before(end); {
			start := time.Now()
			if leases, err := s.Renew(context.Background(), "jobs", all[:n], "o", time.Hour); len(leases) != n || err != nil {
				f.Fatal(len(leases), err)
			}
			times = append(times, time.Since(start))
		}
		rate := float64(n) / median(times).Seconds()
		f.say("| %d | %.0f |", n, rate)
		curve.X, curve.Y = append(curve.X, float64(n)), append(curve.Y, rate)
	}
	f.say("")
	f.curves = append(f.curves, curve)
}

// handOvers is the time from the moment before Unlock to the return of the Lock that
// waited for it, at default settings.
func (f *figures) handOvers() {
	var series []picture.Series
	f.say("## Hand-over\n\nFrom the moment before `Unlock` to the return of the `Lock` that waited for it, at default settings, pgx, 100 of each.\n")
	f.say("| between | p50 | p99 |\n|---|---:|---:|")
	for _, between := range []string{"goroutines", "processes"} {
		first := newMutex(f, f.mutexDriver(f, "table"), coord.MutexConfig{})
		second := first
		if between == "processes" {
			second = newMutex(f, f.mutexDriver(f, "table"), coord.MutexConfig{})
		}
		took := f.handOver(first, second, 100)
		slices.Sort(took)
		f.say("| %s | %.2f ms | %.2f ms |", between, ms(took[50]), ms(took[99]))
		s := picture.Series{Name: between}
		for _, d := range took {
			s.Values = append(s.Values, ms(d))
		}
		series = append(series, s)
	}
	f.say("\nOne who waits in another process asks again after 50 to 100 ms at most; one of the same process is let through at once.\n")
	f.say("![How long hand-overs take](docs/hand-over.svg)\n")
	f.draw(picture.Histogram(filepath.Join(f.dir, "docs/hand-over.svg"), "Hand-over of a table mutex between goroutines and between processes", "milliseconds", 40, series...))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (f *figures) draw(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *figures) handOver(first, second *coord.Mutex, n int) (took []time.Duration) {
	ctx := context.Background()
	for range n {
		lock, err := first.Lock(ctx, "m")
		if err != nil {
			f.Fatal(err)
		}
		got := make(chan *coord.Lock, 1)
		go func() {
			lock, err := second.Lock(ctx, "m")
			if err != nil {
				f.Error(err)
			}
			got <- lock
		}()
		time.Sleep(200*time.Millisecond + rand.N(200*time.Millisecond)) // Until the back-off is at its longest.
		start := time.Now()
		if err := lock.Unlock(ctx); err != nil {
			f.Fatal(err)
		}
		next := <-got
		took = append(took, time.Since(start))
		if next == nil || next.Unlock(ctx) != nil {
			f.Fatal("no lock")
		}
	}
	return took
}

// losses is how long a holder does not know that its lock is lost.
func (f *figures) losses() {
	const ttl, locks = 3 * time.Second, 30
	f.say("## Time to notice a loss\n\nA table mutex with a TTL of 3 s, a renewal each second and a margin of 0.3 s, pgx, %d locks.\n", locks)
	f.say("| what happens | p50 | longest | no later than |\n|---|---:|---:|---:|")
	p, through := newProxy(f, f.env)
	behind := *f.env
	behind.url = through
	gone := f.notice(&behind, ttl, locks, func() { p.swallow() })
	f.say("| the network drops everything | %.2f s | %.2f s | 2.7 s: TTL less the margin |", median(gone).Seconds(), slices.Max(gone).Seconds())
	p.heal()
	taken := f.notice(f.env, ttl, locks, func() { f.exec(f, "UPDATE coord_mutex SET fence = fence + 1000000") })
	f.say("| another takes the lock (the row is changed by hand) | %.2f s | %.2f s | 1 s, and the renewal: the next one is told |\n", median(taken).Seconds(), slices.Max(taken).Seconds())
	f.say("Nobody can write under a guard in the meantime.\n")
}

func (f *figures) notice(e *env, ttl time.Duration, locks int, harm func()) (took []time.Duration) {
	db, err := sql.Open(e.driver, e.url)
	if err != nil {
		f.Fatal(err)
	}
	defer db.Close()
	c, err := coord.New(db, e.dialect, coord.Config{Timeout: time.Second})
	if err != nil {
		f.Fatal(err)
	}
	defer c.Close()
	d, err := c.TableDriver(coord.DriverConfig{})
	if err != nil {
		f.Fatal(err)
	}
	m := newMutex(f, d, coord.MutexConfig{TTL: ttl})
	var held []*coord.Lock
	for i := range locks {
		lock, err := m.Lock(context.Background(), fmt.Sprint("loss-", len(f.text.Bytes()), "-", i))
		if err != nil {
			f.Fatal(err)
		}
		held = append(held, lock)
		time.Sleep(ttl / 3 / time.Duration(locks)) // So that they don't renew together.
	}
	start := time.Now()
	harm()
	times := make(chan time.Duration, locks)
	for _, lock := range held {
		go func() { <-lock.Done(); times <- time.Since(start) }()
	}
	for range held {
		took = append(took, <-times)
	}
	return took
}

// memory is what a held lock costs this process.
func (f *figures) memory() {
	const locks = 10000
	m := newMutex(f, f.mutexDriver(f, "table"), coord.MutexConfig{TTL: time.Hour})
	usage := func() (heap uint64, goroutines int) {
		runtime.GC()
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc, runtime.NumGoroutine()
	}
	heap, goroutines := usage()
	held := make([]*coord.Lock, locks)
	for i := range held {
		lock, err := m.TryLock(context.Background(), fmt.Sprint("many-", i))
		if err != nil {
			f.Fatal(err)
		}
		held[i] = lock
	}
	heapAfter, goroutinesAfter := usage()
	f.say("## 10,000 locks held by one process\n\n| per lock | |\n|---|---:|\n| memory | %.0f bytes |\n| goroutines | %.4f |\n",
		float64(heapAfter-heap)/locks, float64(goroutinesAfter-goroutines)/locks)
	for _, lock := range held {
		if err := lock.Unlock(context.Background()); err != nil {
			f.Fatal(err)
		}
	}
}

// pictures are those of renewals, and of a run in which workers are killed.
func (f *figures) pictures() {
	f.say("## Renewals\n\n![Leases renewed per second, by how many one statement renews](docs/renewals.svg)\n")
	f.draw(picture.Lines(filepath.Join(f.dir, "docs/renewals.svg"), "Renewals", "partitions renewed by one statement", "leases renewed per second", f.curves...))
	f.say("## A run\n\nThree workers contend for nine things while one after the other is killed with SIGKILL (`TestProof`). A lane is a thing, a colour a worker,\na number a fencing token; reservations have none. What a killed worker held stays its own until the TTL of 1 s is over, and a reservation\nthat it had confirmed until its successor gives it up.\n")
	f.say("![A run in which workers are killed](docs/timeline.svg)\n")
	f.Run("run", func(t *testing.T) {
		run := proveUnder(t, faultNamed("kill -9"), "pgx")
		workers := slices.DeleteFunc(run.history, func(e history.Event) bool { return e.Owner == "judge" })
		f.draw(picture.FromHistory("Workers are killed with SIGKILL", workers).Save(filepath.Join(f.dir, "docs/timeline.svg")))
	})
}

func faultNamed(name string) fault {
	return faults[slices.IndexFunc(faults, func(f fault) bool { return f.name == name })]
}
