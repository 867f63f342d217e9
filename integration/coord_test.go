package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/seed-4c80c132/coord"
)

// TestFirstUseAtOnce: 32 processes' worth of first uses and of Migrate, on a
// database that has no table yet.
func TestFirstUseAtOnce(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		const processes = 32
		rounds := 30
		if !e.postgres() || e.pooler || underRace {
			rounds = 8 // Slow there, and no session to race with another.
		}
		var pools []*sql.DB
		for range processes {
			db := e.open(t)
			db.SetMaxOpenConns(2)
			pools = append(pools, db)
		}
		for round := range rounds {
			cfg := e.config()
			cfg.Prefix = fmt.Sprintf("r%d_", round)
			var coords []*coord.Coord
			for _, db := range pools {
				coords = append(coords, newCoord(t, db, e.dialect, cfg))
			}
			var wg sync.WaitGroup
			start := make(chan struct{})
			for i, c := range coords {
				wg.Go(func() {
					<-start
					var err error
					switch i % 4 {
					case 0:
						err = c.Migrate(t.Context())
					case 1:
						_, err = c.Leases().Acquire(t.Context(), "jobs", i, "o", time.Hour)
					case 2:
						_, err = c.Members().Heartbeat(t.Context(), "web", fmt.Sprint(i), "", time.Hour, nil)
					case 3:
						_, err = c.Reservations().Reserve(t.Context(), names, fmt.Sprint(i), ref("o"), "h", time.Hour)
					}
					if err != nil {
						t.Errorf("round %d, process %d: %v", round, i, err)
					}
				})
			}
			close(start)
			wg.Wait()
			for _, c := range coords {
				c.Close()
			}
			if t.Failed() {
				return // One round's errors are enough.
			}
		}
	})
}

func TestMigrateLooksFirst(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Nothing runs DDL any more: a table lock of another session would stop it.
		tx, err := e.db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.Exec("LOCK TABLE coord_lease, coord_member IN ROW EXCLUSIVE MODE; SELECT pg_advisory_xact_lock(4856710386124705089)"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := newCoord(t, e.open(t), e.dialect, e.config()).Migrate(ctx); err != nil {
			t.Errorf("Migrate where all is there = %v", err)
		}
	})
}

// TestSchemaByHand: what Schema prints makes DDLManual work, and is what Migrate
// does.
func TestSchemaByHand(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		cfg := e.config()
		cfg.DDL = coord.DDLManual
		c := newCoord(t, e.db, e.dialect, cfg)
		for range 2 { // A failed first use is tried again at the next.
			if err := c.Migrate(t.Context()); !errors.Is(err, coord.ErrFormat) {
				t.Fatalf("Migrate without tables = %v, want ErrFormat", err)
			}
			if _, err := c.Leases().Acquire(t.Context(), "jobs", 0, "o", time.Hour); !errors.Is(err, coord.ErrFormat) {
				t.Fatalf("Acquire without tables = %v, want ErrFormat", err)
			}
			if _, _, err := c.Reservations().Find(t.Context(), names, "k"); !errors.Is(err, coord.ErrFormat) {
				t.Fatalf("Find without tables = %v, want ErrFormat", err)
			}
		}
		ddl, err := c.Schema(names)
		if err != nil {
			t.Fatal(err)
		}
		e.exec(t, ddl)
		e.exec(t, ddl) // It may be repeated.
		if err := c.Migrate(t.Context(), names); err != nil {
			t.Fatalf("Migrate with tables = %v", err)
		}
		if _, err := c.Leases().Acquire(t.Context(), "jobs", 0, "o", time.Hour); err != nil {
			t.Fatal(err)
		}
	})
}

// TestManualRole: a role that may only read and write rows can use everything and
// never tries DDL.
func TestManualRole(t *testing.T) {
	for _, ddl := range []coord.DDL{coord.DDLManual, coord.DDLAuto} {
		eachPostgres(t, func(t *testing.T, e *env) {
			if err := e.coord(t).Migrate(t.Context(), names); err != nil {
				t.Fatal(err)
			}
			role := fmt.Sprintf("plain_%d", memories.Add(1))
			e.exec(t, "CREATE ROLE "+role+" LOGIN PASSWORD 'plain'")
			t.Cleanup(func() { e.exec(t, "DROP OWNED BY "+role+"; DROP ROLE "+role) })
			e.exec(t, "GRANT USAGE ON SCHEMA public TO "+role+"; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO "+role+
				"; GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO "+role+"; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
			plain := *e
			u, err := url.Parse(e.url)
			if err != nil {
				t.Fatal(err)
			}
			u.User = url.UserPassword(role, "plain")
			plain.url = u.String()
			cfg := e.config()
			cfg.DDL = ddl
			useEverything(t, newCoord(t, plain.open(t), e.dialect, cfg))
		})
	}
}

// useEverything calls every operation once, in an order in which each succeeds.
func useEverything(t *testing.T, c *coord.Coord) {
	t.Helper()
	ctx := t.Context()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s = %v", what, err)
		}
	}
	must("Migrate", c.Migrate(ctx, names))
	lease, err := c.Leases().Acquire(ctx, "jobs", 0, "o", time.Hour)
	must("Acquire", err)
	_, err = c.Leases().Acquire(ctx, "jobs", 0, "p", time.Hour)
	if !errors.Is(err, coord.ErrHeld) {
		t.Fatalf("Acquire by another = %v, want ErrHeld", err)
	}
	leases, err := c.Leases().Renew(ctx, "jobs", []int{0}, "o", time.Hour)
	must("Renew", err)
	owners, err := c.Leases().Owners(ctx, "jobs")
	must("Owners", err)
	if len(leases) != 1 || len(owners) != 1 || lease.Epoch != leases[0].Epoch || lease.Epoch != owners[0].Epoch {
		t.Fatalf("lease %+v, renewed %+v, owners %+v: want one and the same", lease, leases, owners)
	}
	ok, err := c.Leases().Release(ctx, "jobs", 0, "o")
	must("Release", err)
	if !ok {
		t.Fatal("Release = false, want true")
	}
	_, err = c.Members().Heartbeat(ctx, "web", "a", "addr", time.Hour, []string{"g"})
	must("Heartbeat", err)
	members, err := c.Members().List(ctx, "web")
	must("List", err)
	if len(members) != 1 {
		t.Fatalf("List = %v, want one", members)
	}
	must("Leave", c.Members().Leave(ctx, "web", "a"))
	table, err := c.TableDriver(coord.DriverConfig{})
	must("TableDriver", err)
	useMutex(t, table)
	useReservations(t, c.Reservations())
	locker, err := c.EIDLocker(coord.EIDConfig{})
	must("EIDLocker", err)
	useLocker(t, locker)
	_, err = c.Purge(ctx, time.Hour)
	must("Purge", err)
}

// TestNamespaces: schemas and prefixes keep their case and do not see each other.
func TestNamespaces(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		configs := []coord.Config{{}, {Prefix: "other_"}, {Prefix: "_x1"}}
		if e.postgres() {
			e.exec(t, `CREATE SCHEMA one; CREATE SCHEMA "Two"; CREATE SCHEMA two; CREATE SCHEMA "select"`)
			configs = append(configs, coord.Config{Schema: "one"}, coord.Config{Schema: "Two"}, coord.Config{Schema: "two"},
				coord.Config{Schema: "select", Prefix: "Table_"}, coord.Config{Prefix: "COORD_"}, coord.Config{Schema: "one", Prefix: "other_"})
		}
		for i, cfg := range configs {
			cfg.NoPrepare = e.pooler
			cfg.DDL = coord.DDLManual
			if err := newCoord(t, e.open(t), e.dialect, cfg).Migrate(t.Context()); !errors.Is(err, coord.ErrFormat) {
				t.Fatalf("%+v: Migrate = %v, want ErrFormat: another's tables are seen", cfg, err)
			}
			cfg.DDL = coord.DDLAuto
			c := newCoord(t, e.open(t), e.dialect, cfg)
			useEverything(t, c)
			owner := fmt.Sprint("owner-", i)
			if lease, err := c.Leases().Acquire(t.Context(), "jobs", 7, owner, time.Hour); err != nil || lease.Epoch != 1 {
				t.Fatalf("%+v: Acquire = %+v, %v, want epoch 1", cfg, lease, err)
			}
		}
	})
}

func TestSQLiteSchemaIsAnAttachedDatabase(t *testing.T) {
	e := newEnv(t, engines[1], nil)
	useEverything(t, newCoord(t, e.db, e.dialect, coord.Config{Schema: "main"}))
}

// TestNewerFormat: nothing is touched.
func TestNewerFormat(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		for _, table := range []string{"coord_lease", "coord_format"} {
			e.exec(t, "DROP TABLE IF EXISTS coord_lease")
			if err := e.coord(t).Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			e.exec(t, "DROP TABLE coord_lease")
			if table != "coord_lease" {
				e.exec(t, "CREATE TABLE coord_lease (future bigint)")
			} else {
				e.exec(t, "CREATE TABLE coord_lease (group_name bigint)")
			}
			e.exec(t, "UPDATE coord_format SET format = 2 WHERE table_name = '"+table+"'")
			c := newCoord(t, e.open(t), e.dialect, e.config())
			for what, err := range map[string]error{
				"Migrate": c.Migrate(t.Context()),
				"Acquire": func() error { _, err := c.Leases().Acquire(t.Context(), "jobs", 0, "o", time.Hour); return err }(),
			} {
				if !errors.Is(err, coord.ErrFormat) || !strings.Contains(err.Error(), table) {
					t.Errorf("%s with a newer %s = %v, want ErrFormat that names it", what, table, err)
				}
			}
			var format int64
			e.scan(t, "SELECT format FROM coord_format WHERE table_name = '"+table+"'", &format)
			if format != 2 {
				t.Errorf("format = %d afterwards, want 2", format)
			}
			e.exec(t, "UPDATE coord_format SET format = 1")
		}
	})
}

// TestNewerFormatTouchesNothing: not even a table that is missing is made.
func TestNewerFormatTouchesNothing(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context()); err != nil {
			t.Fatal(err)
		}
		e.exec(t, "DROP TABLE coord_lease")
		e.exec(t, "UPDATE coord_format SET format = 2 WHERE table_name = 'coord_format'")
		c := newCoord(t, e.open(t), e.dialect, e.config())
		if _, err := c.Leases().Owners(t.Context(), "jobs"); !errors.Is(err, coord.ErrFormat) {
			t.Errorf("Owners = %v, want ErrFormat", err)
		}
		if _, err := e.db.Exec("SELECT 1 FROM coord_lease"); err == nil {
			t.Error("the table was made")
		}
	})
}

// TestSearchPath: tables are never made before others of their kind that the
// search_path also reaches: two processes would not see the same ones.
func TestSearchPath(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		if _, err := e.coord(t).Leases().Acquire(t.Context(), "jobs", 0, "o", time.Hour); err != nil {
			t.Fatal(err)
		}
		e.exec(t, "CREATE SCHEMA mine")
		other := *e
		other.url += "&search_path=mine,public"
		c := newCoord(t, other.open(t), e.dialect, e.config())
		if _, err := c.Leases().Acquire(t.Context(), "jobs", 0, "p", time.Hour); !errors.Is(err, coord.ErrHeld) {
			t.Errorf("Acquire on the tables in public = %v, want ErrHeld", err)
		}
		if _, err := c.Members().List(t.Context(), "web"); !errors.Is(err, coord.ErrFormat) || !strings.Contains(err.Error(), "Config.Schema") {
			t.Errorf("List whose table would be made in mine = %v, want ErrFormat that says what to do", err)
		}
		cfg := e.config()
		cfg.Schema = "public"
		useEverything(t, newCoord(t, other.open(t), e.dialect, cfg))
	})
}

// TestCloseDuringFirstUse leaves no connection borrowed, whenever it comes.
func TestCloseDuringFirstUse(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		for i := range 25 {
			cfg := e.config()
			cfg.Prefix = fmt.Sprintf("r%d_", i)
			db := e.open(t)
			c := newCoord(t, db, e.dialect, cfg)
			used := make(chan struct{})
			go func() {
				defer close(used)
				_, err := c.Leases().Acquire(context.Background(), "jobs", 0, "o", time.Hour)
				if err != nil && !errors.Is(err, coord.ErrClosed) {
					t.Errorf("Acquire = %v, want success or ErrClosed", err)
				}
			}()
			time.Sleep(time.Duration(i) * 300 * time.Microsecond) // The moment is what varies.
			c.Close()
			<-used
			if n := db.Stats().InUse; n != 0 {
				t.Errorf("%d connections are in use after Close", n)
			}
		}
	})
}

// ownDialect is a dialect made outside of the package.
type ownDialect struct {
	coord.Dialect
	files fstest.MapFS
}

func (d ownDialect) Name() string { return "own" }
func (d ownDialect) SQL() fs.FS   { return d.files }

// copyDialect returns a dialect of the same files, to be changed by the test.
func copyDialect(t *testing.T, d coord.Dialect) ownDialect {
	t.Helper()
	files := fstest.MapFS{}
	err := fs.WalkDir(d.SQL(), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(d.SQL(), path)
		files[path] = &fstest.MapFile{Data: text}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return ownDialect{d, files}
}

func TestOwnDialect(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		useEverything(t, newCoord(t, e.db, copyDialect(t, e.dialect), e.config()))

		d := copyDialect(t, e.dialect)
		delete(d.files, "lease.sql")
		delete(d.files, "reservation.sql")
		c := newCoord(t, e.db, d, e.config())
		ctx := t.Context()
		_, acquire := c.Leases().Acquire(ctx, "jobs", 0, "o", time.Hour)
		_, renew := c.Leases().Renew(ctx, "jobs", []int{0}, "o", time.Hour)
		_, release := c.Leases().Release(ctx, "jobs", 0, "o")
		_, owners := c.Leases().Owners(ctx, "jobs")
		_, reserve := c.Reservations().Reserve(ctx, names, "k", ref("o"), "h", time.Hour)
		_, _, find := c.Reservations().WithTx(&sql.Tx{}).Find(ctx, names, "k")
		migrate := c.Migrate(ctx, names)
		_, schema := c.Schema(names)
		for op, err := range map[string]error{"Acquire": acquire, "Renew": renew, "Release": release, "Owners": owners,
			"Reserve": reserve, "Find": find, "Migrate": migrate, "Schema": schema} {
			if !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("%s without its file = %v, want ErrUnsupported", op, err)
			}
		}
		if _, err := c.Members().Heartbeat(ctx, "web", "a", "", time.Hour, nil); err != nil {
			t.Errorf("Heartbeat without lease.sql = %v", err)
		}
	})
}

// TestSectionNames: the same sections in every engine, each with the parameters
// that the other has; but advisory locks are Postgres's alone.
func TestSectionNames(t *testing.T) {
	optional := []string{"terminate"} // An engine that does not need it has none.
	sections := func(d coord.Dialect) string {
		var names []string
		files, err := fs.Glob(d.SQL(), "*.sql")
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no files: %v", d.Name(), err)
		}
		for _, file := range files {
			if file == "advisory.sql" {
				continue
			}
			text, err := fs.ReadFile(d.SQL(), file)
			if err != nil {
				t.Fatal(err)
			}
			required := slices.DeleteFunc(strings.Split(string(text), "-- name: "), func(section string) bool {
				name, _, _ := strings.Cut(section, "\n")
				return slices.Contains(optional, name)
			})
			for line := range strings.Lines(strings.Join(required, "-- name: ")) {
				if strings.HasPrefix(line, "-- name: ") || strings.HasPrefix(line, "-- (") {
					line, _, _ = strings.Cut(line, ")") // What follows may tell a difference.
					names = append(names, file+" "+strings.TrimSpace(line))
				}
			}
		}
		return strings.Join(names, "\n")
	}
	if p, s := sections(coord.Postgres), sections(coord.SQLite); p != s {
		t.Errorf("Postgres has\n%s\n\nSQLite has\n%s", p, s)
	}
}

// TestSections prepares every section of every dialect on its engine.
func TestSections(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		if err := e.coord(t).Migrate(t.Context(), names); err != nil {
			t.Fatal(err)
		}
		if e.pooler {
			return // Nothing is prepared there.
		}
		files, _ := fs.Glob(e.dialect.SQL(), "*.sql")
		for _, file := range files {
			text, err := fs.ReadFile(e.dialect.SQL(), file)
			if err != nil {
				t.Fatal(err)
			}
			for _, section := range strings.Split(string(text), "-- name: ")[1:] {
				name, statement, _ := strings.Cut(section, "\n")
				stmt, err := e.db.Prepare(statement)
				if err != nil {
					t.Errorf("%s: %s: %v", file, name, err)
					continue
				}
				stmt.Close()
			}
		}
	})
}

// TestPsql: the Postgres files run as they are in the engine's own shell.
func TestPsql(t *testing.T) {
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not installed")
	}
	e := newEnv(t, engines[2], nil)
	cmd := exec.Command(psql, "-v", "ON_ERROR_STOP=1", "-1", "-q", "-d", e.url)
	ddl, err := e.coord(t).Schema(names)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = strings.NewReader(ddl)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("psql: %v\n%s", err, out)
	}
	if err := newCoord(t, e.db, e.dialect, coord.Config{DDL: coord.DDLManual}).Migrate(t.Context(), names); err != nil {
		t.Fatal(err)
	}
}

func TestNoPrepare(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		useEverything(t, newCoord(t, e.db, e.dialect, coord.Config{NoPrepare: true}))
		if e.name == "postgres-pq" { // pgx prepares on its own account.
			var prepared int
			e.scan(t, "SELECT count(*) FROM pg_prepared_statements", &prepared)
			if prepared != 0 {
				t.Errorf("%d statements are prepared, want 0", prepared)
			}
		}
	})
}

func TestPurgeBeforeFirstUse(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := newCoord(t, e.db, e.dialect, coord.Config{DDL: coord.DDLManual})
		if n, err := c.Purge(t.Context(), 0); n != 0 || err != nil {
			t.Errorf("Purge without tables = %d, %v, want 0", n, err)
		}
	})
}

func TestPurgeKeepsEpochs(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *env) {
		c := e.coord(t)
		e.pass(t, grant(t, c.Leases(), "a", time.Millisecond).ExpiresAt)
		if _, err := c.Purge(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		if lease := grant(t, c.Leases(), "b", time.Hour); lease.Epoch != 2 {
			t.Errorf("epoch after Purge = %d, want 2", lease.Epoch)
		}
	})
}
