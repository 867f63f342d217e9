package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// mutexPairs readies a database for TryLock+Unlock in both modes.
func mutexPairs(b testing.TB, e *env) []pair {
	pairs := []pair{tablePair(b, e)}
	if e.postgres() {
		pairs = append(pairs, advisoryPair(b, e))
	}
	return pairs
}

func tryUnlock(b testing.TB, m *coord.Mutex) func() {
	return func() {
		lock, err := m.TryLock(context.Background(), "bench")
		if err != nil {
			b.Fatal(err)
		}
		if err := lock.Unlock(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

func tablePair(b testing.TB, e *env) pair {
	d := e.mutexDriver(b, "table")
	m := newMutex(b, d, coord.MutexConfig{})
	tryUnlock(b, m)() // Makes the table and the row.
	r := newRaw(b, e)
	acquire, release := r.prepare(e, "mutex.sql", "acquire"), r.prepare(e, "mutex.sql", "release")
	var granted bool
	var owner string
	var fence, expires, attempt int64
	return pair{"table", tryUnlock(b, m), func() {
		attempt++
		query(b, acquire, []any{&granted, &owner, &fence, &expires}, "bare", "o", time.Minute.Microseconds(), nil, attempt)
		if fence == 0 { // The first made the row.
			query(b, acquire, []any{&granted, &owner, &fence, &expires}, "bare", "o", time.Minute.Microseconds(), nil, attempt)
		}
		execute(b, release, "bare", fence, attempt)
	}}
}

func advisoryPair(b testing.TB, e *env) pair {
	m := newMutex(b, e.mutexDriver(b, "advisory"), coord.MutexConfig{})
	tryUnlock(b, m)() // Opens the session.
	r := newRaw(b, e)
	exchange := r.prepare(e, "advisory.sql", "exchange")
	query(b, r.prepare(e, "advisory.sql", "mark"), []any{new(string)}, "bare")
	var place int64
	var yes bool
	return pair{"advisory", tryUnlock(b, m), func() {
		query(b, exchange, []any{&place, &yes}, "[[1, true]]", "bare")
		query(b, exchange, []any{&place, &yes}, "[[1, false]]", "bare")
	}}
}

// BenchmarkMutex is TryLock+Unlock, uncontended.
func BenchmarkMutex(b *testing.B) {
	benchmark(b, mutexPairs, func(b *testing.B, p pair) {
		for b.Loop() {
			p.coord()
		}
	})
}

// BenchmarkMutexCost compares it with the two bare statements: see
// BenchmarkLeaseCost.
func BenchmarkMutexCost(b *testing.B) { benchmark(b, mutexPairs, cost) }

// BenchmarkHandOver is the time from the moment before Unlock is called to the
// return of the Lock that waited for it, between goroutines of one process and
// between processes (two drivers on pools of their own), at default settings. A
// refused try beside it is one round trip.
func BenchmarkHandOver(b *testing.B) {
	for _, e := range engines {
		if e.pooler {
			continue
		}
		for _, mode := range modes {
			if mode == "advisory" && e.dialect != coord.Postgres {
				continue
			}
			for _, between := range []string{"goroutines", "processes"} {
				b.Run(fmt.Sprint(e.name, "/", mode, "/between-", between), func(b *testing.B) {
					e := newEnv(b, e, nil)
					first := newMutex(b, e.mutexDriver(b, mode), coord.MutexConfig{})
					second := first
					if between == "processes" {
						second = newMutex(b, e.mutexDriver(b, mode), coord.MutexConfig{})
					}
					handOver(b, first, second)
				})
			}
		}
	}
}

func handOver(b *testing.B, first, second *coord.Mutex) {
	ctx := context.Background()
	var took, trips []time.Duration
	for b.Loop() {
		lock, err := first.Lock(ctx, "m")
		if err != nil {
			b.Fatal(err)
		}
		got := make(chan *coord.Lock, 1)
		go func() {
			lock, err := second.Lock(ctx, "m")
			if err != nil {
				b.Error(err)
			}
			got <- lock
		}()
		time.Sleep(200*time.Millisecond + rand.N(200*time.Millisecond)) // Until the back-off is at its longest.
		start := time.Now()
		if err := lock.Unlock(ctx); err != nil {
			b.Fatal(err)
		}
		trips = append(trips, time.Since(start)) // The release: one round trip.
		next := <-got
		took = append(took, time.Since(start))
		if next == nil || next.Unlock(ctx) != nil {
			b.Fatal("no lock")
		}
	}
	slices.Sort(took)
	slices.Sort(trips)
	b.ReportMetric(float64(took[len(took)/2])/float64(time.Millisecond), "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100])/float64(time.Millisecond), "p99-ms")
	b.ReportMetric(float64(took[len(took)/2])/float64(trips[len(trips)/2]), "p50-round-trips")
}
