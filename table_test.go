package coord

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/lib/pq"
)

// slowDB is a database without tables that takes its time to make one, and undoes what
// its context interrupts. It knows tables by their format records.
type slowDB struct {
	look, ddl func(context.Context) error // run before each look for a table of format records and each DDL

	mu      sync.Mutex
	formats fewRows // the format records
	looks   int
	made    int // how many DDLs were committed
}

// takes is a statement that takes a while.
func takes(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
}

func newSlowCoord(t *testing.T, db *slowDB, cfg Config) *Coord {
	t.Helper()
	cfg.NoPrepare = true
	pool := sql.OpenDB(db)
	c, err := New(pool, Postgres, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); pool.Close() })
	return c
}

func (db *slowDB) Connect(context.Context) (driver.Conn, error) { return slowConn{db}, nil }
func (db *slowDB) Driver() driver.Driver                        { return nil }

// counts returns how often a table was looked for and made.
func (db *slowDB) counts() (looks, made int) {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.looks, db.made
}

func (db *slowDB) seen() fewRows {
	db.mu.Lock()
	defer db.mu.Unlock()
	return slices.Clone(db.formats)
}

// record makes every table there, in a format.
func (db *slowDB) record(c *Coord, format int64) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.formats = fewRows{{c.format.name, int64(knownFormat)}}
	for _, t := range c.known() {
		db.formats = append(db.formats, []driver.Value{t.record, format})
	}
}

type slowConn struct{ db *slowDB }

func (slowConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("not prepared here") }
func (slowConn) Begin() (driver.Tx, error)           { return nil, errors.New("no transactions here") }
func (slowConn) Close() error                        { return nil }

func (c slowConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	formats := c.db.seen() // as they are when the statement begins
	switch {
	case strings.Contains(text, "to_regclass") && args[1].Value == "coord_format":
		c.db.mu.Lock()
		c.db.looks++
		c.db.mu.Unlock()
		if err := c.db.look(ctx); err != nil {
			return nil, err
		}
		fallthrough
	case strings.Contains(text, "to_regclass"):
		if len(formats) == 0 {
			return &fewRows{{"", "public"}}, nil
		}
		return &fewRows{{"public", "public"}}, nil
	case strings.Contains(text, "SELECT table_name, format"):
		return &formats, nil
	}
	return noRows{}, nil
}

func (c slowConn) ExecContext(ctx context.Context, text string, _ []driver.NamedValue) (driver.Result, error) {
	if !strings.Contains(text, "CREATE TABLE") {
		return driver.RowsAffected(0), nil
	}
	if err := c.db.ddl(ctx); err != nil {
		return nil, err
	}
	c.db.mu.Lock()
	defer c.db.mu.Unlock()
	c.db.made++
	c.db.formats = append(c.db.formats, []driver.Value{"coord_format", int64(1)}, []driver.Value{"coord_lease", int64(1)})
	return driver.RowsAffected(0), nil
}

// TestFirstUseOutlivesItsCallers: a table that takes longer to make than any caller
// has is made once, for all of them.
func TestFirstUseOutlivesItsCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &slowDB{look: takes(30 * time.Millisecond), ddl: takes(300 * time.Millisecond)}
		c := newSlowCoord(t, db, Config{})
		start := time.Now()
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for time.Since(start) < 3*time.Second {
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					_, err := c.Leases().Owners(ctx, "g")
					cancel()
					if err == nil {
						break
					}
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("Owners = %v, want its deadline", err)
					}
				}
				if took := time.Since(start); took != 360*time.Millisecond {
					t.Errorf("the first success came after %v, want 360 ms", took)
				}
			})
		}
		wg.Wait()
		if looks, made := db.counts(); looks != 2 || made != 1 {
			t.Errorf("%d looks and %d DDLs, want 2 and 1", looks, made)
		}
	})
}

// TestFirstUseIsBounded as a whole: callers of a server that answers slowly or never
// wait for one timeout together.
func TestFirstUseIsBounded(t *testing.T) {
	for name, db := range map[string]*slowDB{
		"hung": {look: takes(time.Hour)},
		"slow": {look: takes(2 * time.Second), ddl: takes(2 * time.Second)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newSlowCoord(t, db, Config{Timeout: 3 * time.Second})
				start := time.Now()
				var wg sync.WaitGroup
				for i := range 10 {
					wg.Go(func() {
						var err error
						if i%2 == 0 {
							_, err = c.Leases().Owners(t.Context(), "g")
						} else {
							err = c.Migrate(t.Context())
						}
						if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != 3*time.Second {
							t.Errorf("caller %d: %v after %v, want DeadlineExceeded after 3 s", i, err, took)
						}
					})
				}
				wg.Wait()
			})
		})
	}
}

// TestFirstUseFails: all that wait get the error, and the next operation tries again.
func TestFirstUseFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		denied := &pq.Error{Code: "42501"}
		var fails atomic.Bool
		fails.Store(true)
		db := &slowDB{look: takes(time.Second), ddl: func(context.Context) error {
			if fails.Load() {
				return denied
			}
			return nil
		}}
		c := newSlowCoord(t, db, Config{})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, err := c.Leases().Owners(t.Context(), "g"); !errors.Is(err, denied) {
					t.Errorf("Owners = %v, want the failure of the first use", err)
				}
			})
		}
		wg.Wait()
		if looks, _ := db.counts(); looks != 1 {
			t.Errorf("%d looks, want one for all", looks)
		}
		fails.Store(false)
		if _, err := c.Leases().Owners(t.Context(), "g"); err != nil {
			t.Errorf("the next operation = %v, want it to try again", err)
		}
	})
}

// TestCloseEndsFirstUse: callers that wait for it get ErrClosed at once, and it is
// over when Close returns.
func TestCloseEndsFirstUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &slowDB{look: takes(time.Hour)}
		c := newSlowCoord(t, db, Config{})
		gone, leave := context.WithCancel(t.Context())
		go c.Leases().Owners(gone, "g")
		synctest.Wait()
		leave()
		synctest.Wait()
		waits := make(chan error, 1)
		go func() { _, err := c.Leases().Owners(t.Context(), "g"); waits <- err }()
		synctest.Wait()
		start := time.Now()
		c.Close()
		if err := <-waits; !errors.Is(err, ErrClosed) || time.Since(start) != 0 {
			t.Errorf("Owners = %v, and Close took %v, want ErrClosed at once", err, time.Since(start))
		}
		if looks, _ := db.counts(); looks != 1 {
			t.Errorf("%d looks, want the one whose caller has left", looks)
		}
	})
}

// TestMigrateLooksAfresh: what was seen before it was called does not count, and what
// it finds decides what operations find after it.
func TestMigrateLooksAfresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &slowDB{look: takes(time.Second)}
		c := newSlowCoord(t, db, Config{DDL: DDLManual})
		go c.Leases().Owners(t.Context(), "g") // It sees nothing, and is told so after a second.
		synctest.Wait()
		db.record(c, knownFormat)
		if err := c.Migrate(t.Context()); err != nil {
			t.Errorf("Migrate = %v, want it to see what was made before it was called", err)
		}
		db.record(c, knownFormat+1)
		if _, err := c.Leases().Owners(t.Context(), "g"); err != nil {
			t.Errorf("Owners = %v, want nothing looked at again", err)
		}
		if err := c.Migrate(t.Context()); !errors.Is(err, ErrFormat) {
			t.Errorf("Migrate = %v, want ErrFormat", err)
		}
		if _, err := c.Leases().Owners(t.Context(), "g"); !errors.Is(err, ErrFormat) {
			t.Errorf("Owners after Migrate has seen another format = %v, want ErrFormat", err)
		}
	})
}

// TestTxIsNotRemembered: a table that only a transaction has seen is looked for again,
// and on the pool before it counts as there.
func TestTxIsNotRemembered(t *testing.T) {
	c, mock := newMock(t, Config{})
	c.db.SetMaxOpenConns(1) // The look on the pool waits for the end of the transaction.
	typ := readyType(t, c)
	typ.table.ready.Store(false)
	look := func(at string) {
		where := func() *sqlmock.Rows { return sqlmock.NewRows([]string{"at", "home"}).AddRow(at, "public") }
		mock.ExpectQuery(c.format.where).WithArgs("", "coord_format").WillReturnRows(where())
		if at != "" {
			mock.ExpectQuery(c.format.formats).WillReturnRows(sqlmock.NewRows([]string{"table", "format"}).AddRow("coord_format", 1).AddRow(typ.table.record, 1))
			mock.ExpectQuery(c.format.where).WithArgs("", typ.table.name).WillReturnRows(where())
		}
	}
	find := func(tx *sql.Tx) {
		t.Helper()
		mock.ExpectQuery(typ.find).WillReturnRows(sqlmock.NewRows([]string{"none"}))
		if _, _, err := c.Reservations().WithTx(tx).Find(t.Context(), testScope, "k"); err != nil {
			t.Errorf("Find = %v", err)
		}
	}
	for _, committed := range []string{"", "public"} {
		mock.ExpectBegin()
		tx, err := c.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		look("public")
		find(tx)
		if typ.table.ready.Load() {
			t.Fatal("remembered from a transaction that is still open")
		}
		mock.ExpectRollback()
		look(committed) // on the pool
		tx.Rollback()
		for c.mu.Lock(); typ.table.noticed; c.mu.Lock() {
			c.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
		c.mu.Unlock()
		if got, want := typ.table.ready.Load(), committed != ""; got != want {
			t.Fatalf("remembered: %v, want %v", got, want)
		}
	}
	mock.ExpectBegin()
	tx, err := c.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	find(tx) // Nothing is read before.
	mock.ExpectRollback()
	tx.Rollback()
}

// purging is a Coord whose tables are all there but no type of reservations is
// recorded. answer gets the statements of Purge.
func purging(t *testing.T, cfg Config, answer func(table *table, s statement) (driver.Rows, error)) (*Coord, *fakeDriver) {
	t.Helper()
	d := &fakeDriver{}
	c := newCoord(t, d, cfg)
	d.answer = func(s statement) (driver.Rows, error) {
		for _, table := range c.known() {
			if table.purge == s.text || table.trim == s.text {
				return answer(table, s)
			}
		}
		return &fewRows{{"", "public"}}, nil
	}
	return c, d
}

// TestPurgeInBatches: each statement is sent until it changes nothing, however long
// all of it takes, and the pinned connection is left alone.
func TestPurgeInBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := map[string]int64{}
		c, d := purging(t, Config{Timeout: time.Second}, func(table *table, s statement) (driver.Rows, error) {
			time.Sleep(10 * time.Second)
			n := min(left[s.text], 10)
			left[s.text] -= n
			return changed{rows: n}, nil
		})
		typ := readyType(t, c)
		left[c.members.table.purge], left[typ.purge], left[typ.trim] = 25, 10, 15
		if n, err := c.Purge(t.Context(), 0); n != 35 || err != nil {
			t.Errorf("Purge = %d, %v, want 35", n, err)
		}
		sent := map[string]int{}
		for _, s := range d.statements() {
			sent[s.text]++
		}
		if sent[c.members.table.purge] != 4 || sent[typ.purge] != 2 || sent[typ.trim] != 3 {
			t.Errorf("sent %v, want batches until one changes nothing", sent)
		}
		if n := c.db.Stats().InUse; n != 0 {
			t.Errorf("%d connections are in use, want none: it runs on the pool", n)
		}
	})
}

// TestPurgeGoesOn: a table that fails keeps no other from being purged, and the count
// comes with the error.
func TestPurgeGoesOn(t *testing.T) {
	denied := &pq.Error{Code: "42501"}
	batches := map[*table]int{}
	c, _ := purging(t, Config{}, func(table *table, s statement) (driver.Rows, error) {
		batches[table]++
		switch {
		case table.base == "coord_member" && batches[table] == 2, table.base == "coord_mutex":
			return nil, denied
		case batches[table] == 1:
			return changed{rows: 7}, nil
		}
		return changed{}, nil
	})
	n, err := c.Purge(t.Context(), 0)
	if !errors.Is(err, denied) || n != 14 || batches[c.eids.table] != 2 {
		t.Fatalf("Purge = %d, %v, want the error and 14 rows of the other tables", n, err)
	}
	for _, want := range []string{"coord: purge coord_member: ", "coord: purge coord_mutex: "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("Purge = %v, want all that failed", err)
		}
	}
}

// TestPurgeEndsWithItsContext at once, with the count so far, though the driver hangs;
// and with Close.
func TestPurgeEndsWithItsContext(t *testing.T) {
	for _, closed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			stuck := make(chan struct{})
			calls := 0
			c, d := purging(t, Config{}, func(*table, statement) (driver.Rows, error) {
				if calls++; calls == 2 {
					<-stuck
				}
				return changed{rows: 7}, nil
			})
			start := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			want, after := context.DeadlineExceeded, time.Minute
			if closed {
				want, after = ErrClosed, time.Second
				time.AfterFunc(after, func() { c.Close() })
			}
			n, err := c.Purge(ctx, 0)
			if took := time.Since(start); !errors.Is(err, want) || n != 7 || took != after {
				t.Errorf("Purge = %d, %v after %v, want 7 and %v after %v", n, err, took, want, after)
			}
			if n := len(d.statements()); n != 2 {
				t.Errorf("%d statements, want no other table tried", n)
			}
			close(stuck)
		})
	}
	c, d := purging(t, Config{}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := c.Purge(ctx, 0); n != 0 || !errors.Is(err, context.Canceled) || len(d.statements()) > 0 {
		t.Errorf("Purge on a context that has ended = %d, %v, want nothing sent", n, err)
	}
}
