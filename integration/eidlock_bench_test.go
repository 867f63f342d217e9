package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// eidPairs readies a database for locking and releasing sets of ids, one statement
// each.
func eidPairs(b testing.TB, e *env) (pairs []pair) {
	c := e.coord(b)
	l, err := c.EIDLocker(coord.EIDConfig{})
	if err != nil {
		b.Fatal(err)
	}
	ids := manyIDs(10000)
	ctx := context.Background()
	lockIDs(b, l, "tx", ids...) // Makes the table and the rows.
	l.ReleaseLocks(ctx, "tx")
	r := newRaw(b, e)
	acquire, release := r.prepare(e, "eidlock.sql", "acquire"), r.prepare(e, "eidlock.sql", "release")
	var granted bool
	var fence, expires, attempt int64
	var id, owner string
	for _, n := range []int{1, 10, 100, 1000, 10000} {
		list, err := json.Marshal(ids[:n])
		if err != nil {
			b.Fatal(err)
		}
		pairs = append(pairs, pair{
			fmt.Sprintf("ids-%d", n),
			func() {
				if err := l.AcquireLocks(ctx, "tx", ids[:n]...); err != nil {
					b.Fatal(err)
				}
				l.ReleaseLocks(ctx, "tx")
			},
			func() {
				attempt++
				query(b, acquire, []any{&granted, &fence, &id, &owner, &expires}, string(list), c.Owner(), "tx", time.Minute.Microseconds(), nil, attempt)
				execute(b, release, string(list), fence)
			},
		})
	}
	return pairs
}

// BenchmarkEIDLock locks and releases sets of ids; BenchmarkEIDLockCost puts that in
// proportion to the bare statements.
func BenchmarkEIDLock(b *testing.B) {
	benchmark(b, eidPairs, func(b *testing.B, p pair) {
		for b.Loop() {
			p.coord()
		}
	})
}

func BenchmarkEIDLockCost(b *testing.B) { benchmark(b, eidPairs, cost) }
