package testdb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/lib/pq"
)

const (
	// startTimeout bounds the wait for a server that testdb started, on a machine
	// that may be busy.
	startTimeout = 3 * time.Minute
	// existingTimeout bounds the wait for one that should be there.
	existingTimeout = 15 * time.Second
	// readyPoll is the pause between two attempts to connect.
	readyPoll = 20 * time.Millisecond
)

// settings are those of every server that testdb starts.
var settings = []string{
	"fsync=off", // Nothing here has to survive a power cut.
	"synchronous_commit=on",
	"max_connections=300",
	// Tests provoke errors on purpose; a log of them hides the others.
	"log_min_messages=fatal",
	"log_min_error_statement=panic",
	"log_checkpoints=off",
}

var (
	// errAbsent marks a way to a server that isn't there, as opposed to one
	// that is there and broken.
	errAbsent = errors.New("not available")
	// errSkip marks the absence of all of them where that is no failure.
	errSkip = errors.New("testdb: no Postgres server")
	// errStarting marks a failure to connect that may pass.
	errStarting = errors.New("not ready")
)

// server is a Postgres server and what it takes to end it.
type server struct {
	admin  *url.URL     // the maintenance database
	source string       // see Source
	stop   func() error // may be called twice

	exited <-chan struct{} // closed when the server ended; nil: can't be known
	log    *tail           // what the server said last; nil: can't be known
}

// options are what the environment says.
type options struct {
	dsn      string // use this server
	image    string // use this image, "" for none
	required bool   // Docker or nothing
	ci       bool   // no server is a failure
}

func fromEnv(getenv func(string) string) options {
	o := options{
		dsn:      getenv("COORD_TEST_DSN"),
		image:    getenv("COORD_TEST_IMAGE"),
		required: getenv("COORD_TEST_DOCKER") == "required",
		ci:       getenv("CI") == "true",
	}
	switch o.image {
	case "":
		o.image = "postgres:17-alpine"
	case "none":
		o.image = ""
	}
	return o
}

// open finds or starts a server and says on standard error which, and how long
// that took. If there is none it says so in one line there, since go test shows
// the reasons of skipped tests to nobody who didn't ask.
func open(ctx context.Context, o options) (*server, error) {
	began := time.Now()
	srv, err := find(ctx, o)
	if errors.Is(err, errAbsent) {
		err = verdict(o, err)
	}
	if errors.Is(err, errSkip) {
		say("%v", err)
		return nil, errSkip
	}
	if err != nil {
		return nil, err
	}
	say("testdb: using %s, ready in %v", srv.source, time.Since(began).Round(time.Millisecond))
	return srv, nil
}

// verdict turns the absence of every server into a skip or, in CI and wherever
// Docker is required, a failure. The text is one line, whatever the causes say.
func verdict(o options, cause error) error {
	why := strings.Join(strings.Fields(cause.Error()), " ")
	switch {
	case o.required:
		return fmt.Errorf("testdb: COORD_TEST_DOCKER=required, but: %s", why)
	case o.ci:
		return fmt.Errorf("testdb: CI=true, but no Postgres server: %s; %s", why, remedy)
	}
	return fmt.Errorf("%w: POSTGRES TESTS ARE SKIPPED; %s (%s)", errSkip, remedy, why)
}

const remedy = "set COORD_TEST_DSN to a postgres:// URL, or start Docker (COORD_TEST_IMAGE names the image), " +
	"or install the server programs (initdb and postgres)"

// find goes through the ways to a server in their order. Its error is errAbsent
// only if each of them is.
func find(ctx context.Context, o options) (*server, error) {
	switch {
	case o.required && (o.dsn != "" || o.image == ""):
		return nil, errors.New("testdb: COORD_TEST_DOCKER=required contradicts COORD_TEST_DSN and COORD_TEST_IMAGE=none")
	case o.dsn != "":
		return existing(ctx, o.dsn)
	case o.required:
		return inDocker(ctx, o.image)
	case o.image == "":
		return onMachine(ctx)
	}
	srv, dockerErr := inDocker(ctx, o.image)
	if !errors.Is(dockerErr, errAbsent) {
		return srv, dockerErr
	}
	if errors.Is(dockerErr, errNoImage) {
		say("testdb: going on to the server programs of this machine: %v", dockerErr)
	}
	srv, err := onMachine(ctx)
	if errors.Is(err, errAbsent) {
		return nil, fmt.Errorf("%w; %w", dockerErr, err)
	}
	return srv, err
}

// existing is the server at dsn, which somebody else stops.
func existing(ctx context.Context, dsn string) (*server, error) {
	admin, err := parseDSN(dsn)
	if err != nil {
		return nil, err
	}
	srv := &server{admin: admin, source: "COORD_TEST_DSN", stop: func() error { return nil }}
	if _, err := srv.ready(ctx, existingTimeout); err != nil {
		return nil, fmt.Errorf("testdb: COORD_TEST_DSN: %w", err)
	}
	return srv, nil
}

func parseDSN(dsn string) (*url.URL, error) {
	u, err := url.Parse(dsn)
	if err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
		// Not wrapped: url.Parse's error repeats the password.
		return nil, errors.New("testdb: COORD_TEST_DSN is no postgres:// URL")
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/postgres"
	}
	if q := u.Query(); !q.Has("sslmode") {
		q.Set("sslmode", "disable")
		u.RawQuery = q.Encode()
	}
	return u, nil
}

// adminURL is the maintenance database of a server that testdb started.
func adminURL(hostPort, password string) *url.URL {
	return &url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword("postgres", password),
		Host:     hostPort,
		Path:     "/postgres",
		RawQuery: "sslmode=disable",
	}
}

// database is the URL of another database on the server.
func (s *server) database(name string) string {
	u := *s.admin
	u.Path = "/" + name
	return u.String()
}

// ready waits until the server answers a query and returns its version. It
// gives up at once if the server ended or refuses for good.
func (s *server) ready(ctx context.Context, timeout time.Duration) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		version, err := s.version(ctx)
		if !errors.Is(err, errStarting) {
			return version, err
		}
		select {
		case <-tick.C:
		case <-s.exited:
			return "", fmt.Errorf("the server ended before it was ready: %s", s.log)
		case <-ctx.Done():
			return "", fmt.Errorf("no answer in %v: %w; %s", timeout, err, s.log)
		}
	}
}

// version asks the server once. Its error is errStarting if nothing answered,
// or a server that is starting did.
func (s *server) version(ctx context.Context) (string, error) {
	db, err := s.open()
	if err != nil {
		return "", err
	}
	defer db.Close()
	var v string
	err = db.QueryRowContext(ctx, "SHOW server_version").Scan(&v)
	var refused *pq.Error
	switch {
	case err == nil:
		return strings.Fields(v)[0], nil
	case errors.As(err, &refused) && refused.Code != "57P03": // cannot_connect_now
		return "", err
	}
	return "", fmt.Errorf("%w: %w", errStarting, err)
}

// open returns a pool on the maintenance database. lib/pq waits for the greeting
// of whoever accepted the connection as long as it takes, past the context's
// deadline, unless the URL has a limit.
func (s *server) open() (*sql.DB, error) {
	u := *s.admin
	q := u.Query()
	q.Set("connect_timeout", "5") // seconds
	u.RawQuery = q.Encode()
	return sql.Open("postgres", u.String())
}

func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

// tail keeps the end of what is written to it, for error messages.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

func (t *tail) Write(p []byte) (int, error) {
	const keep = 2048
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if extra := len(t.buf) - keep; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	if t == nil {
		return "no log"
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintf("its log ends %q", t.buf)
}
