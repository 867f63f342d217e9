package integration

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// sectionText is one statement of a dialect's file, as coord would send it under
// the default names.
func sectionText(t testing.TB, d coord.Dialect, file, name string) string {
	t.Helper()
	text, err := fs.ReadFile(d.SQL(), file)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "-- name: "+name+"\n")
	if !ok {
		t.Fatalf("%s has no section %s", file, name)
	}
	rest, _, _ = strings.Cut(rest, "\n-- name: ")
	var statement strings.Builder
	for line := range strings.Lines(rest) {
		if !strings.HasPrefix(line, "--") { // Drivers may parse it again each time.
			statement.WriteString(line)
		}
	}
	return strings.TrimSpace(statement.String())
}

// raw runs bare statements, prepared on one connection, and drains their rows into
// plain variables: what coord's cost is compared with.
type raw struct {
	b    testing.TB
	conn *sql.Conn
}

func newRaw(b testing.TB, e *env) *raw {
	b.Helper()
	conn, err := e.db.Conn(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	return &raw{b, conn}
}

func (r *raw) prepare(e *env, file, name string) *sql.Stmt {
	r.b.Helper()
	stmt, err := r.conn.PrepareContext(context.Background(), sectionText(r.b, e.dialect, file, name))
	if err != nil {
		r.b.Fatal(err)
	}
	r.b.Cleanup(func() { stmt.Close() })
	return stmt
}

// query runs stmt under a deadline, as coord and any careful caller would, and
// scans every row into to.
func query(b testing.TB, stmt *sql.Stmt, to []any, args ...any) (n int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	rows, err := stmt.QueryContext(ctx, args...)
	if err != nil {
		b.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(to...); err != nil {
			b.Fatal(err)
		}
		n++
	}
	if err := rows.Err(); err != nil {
		b.Fatal(err)
	}
	return n
}

func execute(b testing.TB, stmt *sql.Stmt, args ...any) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := stmt.ExecContext(ctx, args...); err != nil {
		b.Fatal(err)
	}
}

// pair is one operation, through coord and as the same statements sent bare.
type pair struct {
	name        string
	coord, bare func()
}

// leasePairs readies a database for the operations and returns them.
func leasePairs(b testing.TB, e *env) []pair {
	s, r := e.coord(b).Leases(), newRaw(b, e)
	all := e.fillLeases(b, s, 10000)
	acquire, release, renew := r.prepare(e, "lease.sql", "acquire"), r.prepare(e, "lease.sql", "release"), r.prepare(e, "lease.sql", "renew")
	var granted, renewed bool
	var owner string
	var partition, epoch, expires int64
	ctx := context.Background()
	pairs := []pair{{
		"acquire+release",
		func() {
			if _, err := s.Acquire(ctx, "bench", 0, "o", time.Minute); err != nil {
				b.Fatal(err)
			}
			if ok, err := s.Release(ctx, "bench", 0, "o"); !ok || err != nil {
				b.Fatal(ok, err)
			}
		},
		func() {
			query(b, acquire, []any{&granted, &owner, &epoch, &expires}, "bench", 0, "o", time.Minute.Microseconds(), nil, int64(1))
			execute(b, release, "bench", 0, "o", 0, 0)
		},
	}}
	for _, n := range []int{1, 100, 10000} {
		list := strings.Join(strings.Fields(fmt.Sprint(all[:n])), ",")
		pairs = append(pairs, pair{
			fmt.Sprintf("renew-%d", n),
			func() {
				if leases, err := s.Renew(ctx, "jobs", all[:n], "o", time.Hour); len(leases) != n || err != nil {
					b.Fatal(len(leases), err)
				}
			},
			func() {
				if got := query(b, renew, []any{&partition, &epoch, &expires, &renewed}, "jobs", list, "o", time.Hour.Microseconds(), nil); got != n {
					b.Fatal(got)
				}
			},
		})
	}
	return pairs
}

// benchmark runs what measures every pair on every engine.
func benchmark(b *testing.B, pairs func(testing.TB, *env) []pair, measure func(*testing.B, pair)) {
	for _, e := range engines {
		if e.pooler {
			continue // There is no bare prepared statement to compare with.
		}
		b.Run(e.name, func(b *testing.B) {
			for _, p := range pairs(b, newEnv(b, e, nil)) {
				b.Run(p.name, func(b *testing.B) { measure(b, p) })
			}
		})
	}
}

// BenchmarkLease is to be read beside BenchmarkRaw, and BenchmarkLeaseCost puts
// the two in proportion.
func BenchmarkLease(b *testing.B) {
	benchmark(b, leasePairs, func(b *testing.B, p pair) {
		for b.Loop() {
			p.coord()
		}
	})
}

// BenchmarkRaw sends the statements of BenchmarkLease bare through the same driver.
func BenchmarkRaw(b *testing.B) {
	benchmark(b, leasePairs, func(b *testing.B, p pair) {
		for b.Loop() {
			p.bare()
		}
	})
}

// BenchmarkLeaseCost takes turns between the two, so that a busy machine slows both
// alike, and reports the ratio of their medians.
func BenchmarkLeaseCost(b *testing.B) { benchmark(b, leasePairs, cost) }

// turn runs both once, in any order: the server cleans a page up when it is full, which
// could else fall to the same one for ever.
func (p pair) turn(times *[2][]time.Duration) {
	ops := [2]func(){p.coord, p.bare}
	first := rand.IntN(2)
	for _, which := range []int{first, 1 - first} {
		start := time.Now()
		ops[which]()
		times[which] = append(times[which], time.Since(start))
	}
}

func cost(b *testing.B, p pair) {
	var times [2][]time.Duration
	for b.Loop() {
		p.turn(&times)
	}
	median := func(d []time.Duration) float64 { slices.Sort(d); return float64(d[len(d)/2]) }
	b.ReportMetric(median(times[0])/median(times[1]), "coord/bare")
}
