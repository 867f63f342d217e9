package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// blockDDL stops every DDL of coord until release is called.
func blockDDL(t *testing.T, e *env) (release func()) {
	t.Helper()
	db := e.open(t)
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "BEGIN; SELECT pg_advisory_xact_lock(4856710386124705089)", "ROLLBACK"
	if !e.postgres() {
		begin = "BEGIN IMMEDIATE"
	}
	if _, err := conn.ExecContext(t.Context(), begin); err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() {
		conn.ExecContext(context.Background(), end)
		conn.Close()
	})
	t.Cleanup(release)
	return release
}

// TestFirstUseOutlivesItsCallers: the table is made though every caller that asked for
// it left before.
func TestFirstUseOutlivesItsCallers(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		looks := newCoord(t, e.db, e.dialect, coord.Config{DDL: coord.DDLManual, NoPrepare: e.pooler, Timeout: 30 * time.Second})
		release := blockDDL(t, e)
		var wg sync.WaitGroup
		for range 4 {
			c := newCoord(t, e.open(t), e.dialect, e.config())
			for range 2 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					defer cancel()
					if _, err := c.Leases().Acquire(ctx, "jobs", 0, "o", time.Hour); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("Acquire while no table can be made = %v, want its deadline", err)
					}
				})
			}
		}
		wg.Wait()
		release()
		eventually(t, "the table is there", func() bool {
			_, err := looks.Leases().Owners(t.Context(), "jobs")
			return err == nil
		})
	})
}

// TestTableOfATransaction that made it: it can be used there, and after a rollback it
// is made again.
func TestTableOfATransaction(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c, rollback := e.coord(t), errors.New("rolled back")
		schema, err := c.Schema(names)
		if err != nil {
			t.Fatal(err)
		}
		err = inTx(t, e.db, nil, func(tx *sql.Tx) error {
			if _, err := tx.Exec(schema); err != nil {
				return err
			}
			reserve(t, c.Reservations().WithTx(tx), "k", "a", "h", time.Hour)
			return rollback
		})
		if !errors.Is(err, rollback) {
			t.Fatal(err)
		}
		reserve(t, c.Reservations(), "k", "b", "h", time.Hour)
		if got := find(t, c.Reservations(), "k"); got != "b h" {
			t.Errorf("found %q, want what was reserved after the rollback", got)
		}
	})
}

// TestPurgeInBatches: all that may go goes, though it is more than one batch.
func TestPurgeInBatches(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		if err := c.Migrate(t.Context(), names); err != nil {
			t.Fatal(err)
		}
		many := "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 25000) "
		locks := "INSERT INTO coord_mutex (name, owner, fence, attempt, dated, expires_at) SELECT "
		keys := "INSERT INTO " + namesTable + " (tenant, namespace, key, owner_tenant, owner_id, confirmed, version, %s expires_at, released) SELECT '', '', "
		if e.postgres() {
			e.exec(t, many+locks+"i::text, '', 1, 0, 'epoch', 'epoch' FROM n")
			e.exec(t, many+fmt.Sprintf(keys, "holds, hold_expires, hold_attempts,")+
				`i::text, '', 'o', i % 2 = 0, 0, '{}', '{}', '{}', 'epoch', '[["", "p", 1, 1]]' FROM n`)
		} else {
			e.exec(t, many+locks+"i, '', i, 0, 0, 0 FROM n")
			e.exec(t, many+fmt.Sprintf(keys, "holds,")+`i, '', 'o', i % 2 = 0, 0, '[]', 0, '[["", "p", 1, 1]]' FROM n`)
		}
		if n, err := c.Purge(t.Context(), time.Hour); n != 25000+12500 || err != nil {
			t.Errorf("Purge = %d, %v, want 37500", n, err)
		}
		var kept, grown int
		e.scan(t, "SELECT count(*) FROM "+namesTable, &kept)
		e.scan(t, "SELECT count(*) FROM "+namesTable+" WHERE CAST(released AS text) <> '[]'", &grown)
		if kept != 12500 || grown != 0 {
			t.Errorf("%d keys are left, and %d that remember a release, want 12500 and 0", kept, grown)
		}
	})
}

// namesTable is the table of the type of names.
var namesTable = "coord_reservation__" + names.Context + "__" + names.Aggregate
