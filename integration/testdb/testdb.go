// Package testdb gives tests a real Postgres server, and each test a database
// of its own on it.
//
// The server is the first of these that can be had:
//
//  1. COORD_TEST_DSN, a postgres:// URL of a server that runs already, whose
//     user may create databases;
//  2. a container of COORD_TEST_IMAGE (postgres:17-alpine unless set; "none"
//     skips Docker), started through dockertest;
//  3. the server programs of this machine, run in a temporary directory.
//
// With none of them, tests that ask for Postgres are skipped; with CI=true they
// fail. COORD_TEST_DOCKER=required makes the second way the only one.
//
// A package that uses testdb has this, or its server outlives the tests:
//
//	func TestMain(m *testing.M) { os.Exit(testdb.Main(m)) }
package testdb

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
)

const (
	// stateTimeout bounds one attempt to CREATE or DROP a database. Both can wait
	// for a checkpoint, which takes long on a busy machine.
	stateTimeout = time.Minute
	// statePatience bounds the attempts together.
	statePatience = 5 * time.Minute
	// statePause is the pause between two of them.
	statePause = 100 * time.Millisecond
)

// shared is the one server of this process.
var shared struct {
	once   sync.Once
	server atomic.Pointer[server] // Source doesn't wait for once.
	err    error
}

// Main runs the tests and then stops the server that they started, whether they
// passed or not. It returns the code to exit with.
func Main(m *testing.M) int {
	go stopOnSignal()
	code := m.Run()
	stopBouncers()
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// Postgres creates an empty database, dropped when tb ends, and returns its
// postgres:// URL. The first call of a process starts the server. It is safe to
// call from parallel tests.
func Postgres(tb testing.TB) string {
	tb.Helper()
	srv := use(tb)
	name := "coord_test_" + strings.ToLower(rand.Text())
	// template0: nobody can be connected to it, and CREATE DATABASE fails while
	// anybody is connected to its template.
	err := srv.exec(tb.Context(), "CREATE DATABASE "+pq.QuoteIdentifier(name)+" TEMPLATE template0")
	if err != nil {
		tb.Fatalf("testdb: create database: %v", err)
	}
	tb.Cleanup(func() {
		tb.Helper()
		// Not tb.Context: it has ended by now.
		err := srv.exec(context.Background(), "DROP DATABASE IF EXISTS "+pq.QuoteIdentifier(name)+" WITH (FORCE)")
		if err != nil {
			tb.Errorf("testdb: drop database: %v", err)
		}
	})
	return srv.database(name)
}

// Admin returns the postgres:// URL of the server's maintenance database, for
// roles and settings. What a test changes there, it changes for every test.
func Admin(tb testing.TB) string {
	tb.Helper()
	return use(tb).admin.String()
}

// Source says which server the tests got, such as "docker postgres:17-alpine",
// "local PostgreSQL 15.18" or "COORD_TEST_DSN", and "none" before the first call
// of [Postgres] or [Admin] has returned.
func Source() string {
	if srv := shared.server.Load(); srv != nil {
		return srv.source
	}
	return "none"
}

// use returns the server, starting it for the first caller. It ends tb if there
// is none.
func use(tb testing.TB) *server {
	tb.Helper()
	// Not on tb.Context: the server outlives the test that came first.
	shared.once.Do(func() {
		srv, err := open(context.Background(), fromEnv(os.Getenv))
		shared.server.Store(srv)
		shared.err = err
	})
	switch {
	case shared.err == nil:
		return shared.server.Load()
	case errors.Is(shared.err, errSkip):
		tb.Skip(shared.err)
	default:
		tb.Fatal(shared.err)
	}
	return nil
}

// stop ends the server, if there is one, and keeps later tests from starting
// another. It waits for a start under way.
func stop() error {
	shared.once.Do(func() { shared.err = errors.New("testdb: the tests have ended") })
	if srv := shared.server.Load(); srv != nil {
		return srv.stop()
	}
	return nil
}

// stopOnSignal cleans up after an interrupt from the keyboard, which would end
// the process before Main gets to it.
func stopOnSignal() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	<-c
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(1)
}

// exec runs one statement in the maintenance database, again on another connection
// if that failed but the server did not refuse it: it must be safe to repeat. A busy
// server greets or answers some connections too late.
func (s *server) exec(ctx context.Context, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, statePatience)
	defer cancel()
	for again := false; ; again = true {
		err := s.execOnce(ctx, statement)
		switch {
		case err == nil, again && sqlState(err) == "42P04": // It exists: made by an attempt whose reply was lost.
			return nil
		case !passing(err):
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(statePause):
		}
	}
}

// execOnce opens a connection for one statement alone, so that a test which counts
// connections or goroutines sees none of ours.
func (s *server) execOnce(ctx context.Context, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	db, err := s.open()
	if err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, statement)
	return errors.Join(err, db.Close())
}

// passing reports whether a statement that failed with err may succeed on another
// connection: the server did not answer, or has no room, is busy with the database, or
// ended the session.
func passing(err error) bool {
	switch state := sqlState(err); {
	case state == "", state == "55006":
		return true
	default:
		return slices.Contains([]string{"53", "57", "08"}, state[:2])
	}
}

// sqlState is the server's code for a failure, "" if the failure is not the server's.
func sqlState(err error) string {
	var refused interface{ SQLState() string }
	if errors.As(err, &refused) {
		return refused.SQLState()
	}
	return ""
}
