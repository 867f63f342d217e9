package testdb

import (
	"database/sql"
	"errors"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

func TestDatabasesAreSeparate(t *testing.T) {
	t.Parallel()
	a, b := connect(t, Postgres(t)), connect(t, Postgres(t))
	if _, err := a.ExecContext(t.Context(), "CREATE TABLE only_in_a (id INT)"); err != nil {
		t.Fatal(err)
	}
	const visible = "SELECT to_regclass('only_in_a') IS NOT NULL"
	if !ask[bool](t, a, visible) {
		t.Error("the table is not in the database it was made in")
	}
	if ask[bool](t, b, visible) {
		t.Error("the table is in another database too")
	}
}

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	for range 8 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			ask[int](t, connect(t, Postgres(t)), "SELECT 1")
		})
	}
}

func TestDropped(t *testing.T) {
	t.Parallel()
	const count = "SELECT count(*) FROM pg_database WHERE datname = $1"
	admin := connect(t, Admin(t))
	var name string
	t.Run("user", func(t *testing.T) {
		// Left open: the drop must not be stopped by a connection.
		db, err := sql.Open("postgres", Postgres(t))
		if err != nil {
			t.Fatal(err)
		}
		name = ask[string](t, db, "SELECT current_database()")
		if got := ask[int](t, admin, count, name); got != 1 {
			t.Errorf("during the test %d databases named %s, want 1", got, name)
		}
	})
	if got := ask[int](t, admin, count, name); got != 0 {
		t.Errorf("after the test %d databases named %s, want 0", got, name)
	}
}

// A connection that breaks, as one does that a busy server does not greet in time, is
// no reason to give up: the statement is sent again on another.
func TestExecOnAnotherConnection(t *testing.T) {
	t.Parallel()
	const broken = 8 // database/sql tries three times by itself
	real := use(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			client, err := l.Accept()
			if err != nil {
				return
			}
			if n < broken {
				client.Close()
				continue
			}
			server, err := net.Dial("tcp", real.admin.Host)
			if err != nil {
				client.Close()
				continue
			}
			go func() { defer client.Close(); io.Copy(client, server) }()
			go func() { defer server.Close(); io.Copy(server, client) }()
		}
	}()
	behind := *real
	behind.admin = &url.URL{}
	*behind.admin = *real.admin
	behind.admin.Host = l.Addr().String()
	if err := behind.exec(t.Context(), "SELECT 1"); err != nil {
		t.Errorf("exec = %v, want another try", err)
	}
	var refused *pq.Error
	if err := behind.exec(t.Context(), "no statement"); !errors.As(err, &refused) {
		t.Errorf("exec of no statement = %v, want the server's refusal", err)
	}
}

func TestServer(t *testing.T) {
	t.Parallel()
	db := connect(t, Postgres(t))
	version, err := strconv.Atoi(ask[string](t, db, "SHOW server_version_num"))
	if err != nil || version < 14_00_00 {
		t.Errorf("server_version_num = %d, %v, want 140000 or more", version, err)
	}
	if got := Source(); got == "" || got == "none" {
		t.Errorf("Source() = %q, want a server", got)
	}
	t.Logf("%s is %d", Source(), version)
	if Source() == "COORD_TEST_DSN" {
		return
	}
	for _, s := range settings {
		name, want, _ := strings.Cut(s, "=")
		if got := ask[string](t, db, "SELECT current_setting($1)", name); got != want {
			t.Errorf("%s = %s, want %s", name, got, want)
		}
	}
}

func TestVerdict(t *testing.T) {
	none := errors.Join(errAbsent, errors.New("nothing\nhere"))
	for _, test := range []struct {
		name string
		env  map[string]string
		skip bool
		says []string
	}{
		{"by hand", nil, true, []string{"SKIPPED", "COORD_TEST_DSN", "Docker", "initdb", "nothing here"}},
		{"ci", map[string]string{"CI": "true"}, false, []string{"CI=true", "COORD_TEST_DSN", "Docker", "initdb"}},
		{"required", map[string]string{"COORD_TEST_DOCKER": "required"}, false, []string{"COORD_TEST_DOCKER", "nothing here"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := verdict(fromEnv(func(k string) string { return test.env[k] }), none)
			if got := errors.Is(err, errSkip); got != test.skip {
				t.Errorf("skip = %v, want %v", got, test.skip)
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("verdict = %q, want one line", err)
			}
			for _, want := range test.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("verdict = %q, want it to say %q", err, want)
				}
			}
		})
	}
}

func TestFromEnv(t *testing.T) {
	for _, test := range []struct{ set, want string }{
		{"", "postgres:17-alpine"},
		{"none", ""},
		{"postgres:14", "postgres:14"},
	} {
		env := map[string]string{"COORD_TEST_IMAGE": test.set}
		if got := fromEnv(func(k string) string { return env[k] }).image; got != test.want {
			t.Errorf("COORD_TEST_IMAGE=%q: image = %q, want %q", test.set, got, test.want)
		}
	}
}

func TestRequiredContradicted(t *testing.T) {
	for _, o := range []options{
		{required: true, dsn: "postgres://localhost"},
		{required: true, image: ""},
	} {
		_, err := find(t.Context(), o)
		if err == nil || errors.Is(err, errAbsent) || !strings.Contains(err.Error(), "contradicts") {
			t.Errorf("find(%+v) = %v, want a contradiction", o, err)
		}
	}
}

func TestParseDSN(t *testing.T) {
	for _, test := range []struct{ dsn, want string }{
		{"postgres://u@h", "postgres://u@h/postgres?sslmode=disable"},
		{"postgresql://u@h:1/d?sslmode=require", "postgresql://u@h:1/d?sslmode=require"},
		{"host=h user=u", ""},
		{"postgres://u:%zz@h", ""},
	} {
		u, err := parseDSN(test.dsn)
		if got := text(u); got != test.want || (err != nil) != (test.want == "") {
			t.Errorf("parseDSN(%q) = %q, %v, want %q", test.dsn, got, err, test.want)
		}
	}
}

func TestSplitImage(t *testing.T) {
	for _, test := range []struct{ image, repository, tag string }{
		{"postgres", "postgres", "latest"},
		{"postgres:17-alpine", "postgres", "17-alpine"},
		{"host:5000/postgres", "host:5000/postgres", "latest"},
	} {
		if r, tag := splitImage(test.image); r != test.repository || tag != test.tag {
			t.Errorf("splitImage(%q) = %q, %q, want %q, %q", test.image, r, tag, test.repository, test.tag)
		}
	}
}

func TestExpiryOutlastsTheTests(t *testing.T) {
	for _, test := range []struct{ timeout, want time.Duration }{
		{time.Minute, 15 * time.Minute},
		{time.Hour, 61 * time.Minute},
		{0, 2 * time.Hour},
	} {
		if got := expiry(test.timeout); got != uint(test.want.Seconds()) {
			t.Errorf("expiry(%v) = %d s, want %v", test.timeout, got, test.want)
		}
	}
}

func TestTailKeepsTheEnd(t *testing.T) {
	var log tail
	for range 1000 {
		log.Write([]byte("noise "))
	}
	log.Write([]byte("last words"))
	if got := log.String(); !strings.HasSuffix(got, `last words"`) || len(got) > 3000 {
		t.Errorf("tail = %d bytes ending %q, want at most 3000 ending in the last words", len(got), got[len(got)-20:])
	}
}

func connect(tb testing.TB, dsn string) *sql.DB {
	tb.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { db.Close() })
	return db
}

func ask[T any](tb testing.TB, db *sql.DB, query string, args ...any) (v T) {
	tb.Helper()
	if err := db.QueryRowContext(tb.Context(), query, args...).Scan(&v); err != nil {
		tb.Fatal(err)
	}
	return v
}

func text(u *url.URL) string {
	if u == nil {
		return ""
	}
	return u.String()
}
