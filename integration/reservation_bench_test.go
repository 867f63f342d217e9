package integration

import (
	"context"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// reservationPairs readies a database for Reserve+Confirm, and for a Reserve that
// is refused.
func reservationPairs(b testing.TB, e *env) []pair {
	s, ctx := e.coord(b).Reservations(), context.Background()
	owner, other := ref("o"), ref("other")
	if _, err := s.Confirm(ctx, names, "held", other, 1); err != nil { // Makes the table.
		b.Fatal(err)
	}
	r := newRaw(b, e)
	reserve, confirm, find := r.prepare(e, "reservation.sql", "reserve"), r.prepare(e, "reservation.sql", "confirm"), r.prepare(e, "reservation.sql", "find")
	var version, bareVersion int64
	var granted, confirmed bool
	var tenant, id, holds string
	var at, expires, outcome int64
	row := []any{&granted, &tenant, &id, &confirmed, &at, &holds, &expires}
	send := func(key string) int {
		return query(b, reserve, row, names.Tenant, names.Namespace, key, owner.Tenant, owner.ID, "h", time.Minute.Microseconds(), nil, int64(1), true)
	}
	return []pair{{
		"reserve+confirm",
		func() {
			version++
			if _, err := s.Reserve(ctx, names, "coord", owner, "h", time.Minute); err != nil {
				b.Fatal(err)
			}
			if got, err := s.Confirm(ctx, names, "coord", owner, version); got != coord.ConfirmedNow || err != nil {
				b.Fatal(got, err)
			}
		},
		func() {
			bareVersion++
			send("bare")
			query(b, confirm, []any{&outcome}, names.Tenant, names.Namespace, "bare", owner.Tenant, owner.ID, bareVersion, nil)
		},
	}, {
		"refused",
		func() {
			if _, err := s.Reserve(ctx, names, "held", owner, "h", time.Minute); err == nil {
				b.Fatal("granted")
			}
		},
		func() {
			if send("held") == 0 {
				query(b, find, row[1:], names.Tenant, names.Namespace, "held", nil)
			}
		},
	}}
}

// BenchmarkReservation is what reserving a key costs, and being refused.
func BenchmarkReservation(b *testing.B) {
	benchmark(b, reservationPairs, func(b *testing.B, p pair) {
		for b.Loop() {
			p.coord()
		}
	})
}

// BenchmarkReservationCost compares it with the bare statements: see
// BenchmarkLeaseCost.
func BenchmarkReservationCost(b *testing.B) { benchmark(b, reservationPairs, cost) }
