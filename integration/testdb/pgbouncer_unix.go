//go:build unix

package testdb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// bouncers are the PgBouncers of this process, in transaction mode, by their
// further settings.
var bouncers = struct {
	mu sync.Mutex
	by map[string]*bouncer
}{by: map[string]*bouncer{}}

type bouncer struct {
	addr string
	stop func()
	err  error
}

// PgBouncer creates an empty database as Postgres does and returns a URL that leads
// to it through a PgBouncer in transaction mode, with further lines of settings.
// Without the program the test is skipped, and fails in CI.
func PgBouncer(tb testing.TB, settings string) string {
	tb.Helper()
	direct, err := url.Parse(Postgres(tb))
	if err != nil {
		tb.Fatal(err)
	}
	bouncers.mu.Lock()
	defer bouncers.mu.Unlock()
	b := bouncers.by[settings]
	if b == nil {
		b = &bouncer{}
		b.addr, b.stop, b.err = startBouncer(direct, settings)
		bouncers.by[settings] = b
	}
	switch {
	case errors.Is(b.err, exec.ErrNotFound) && os.Getenv("CI") != "true":
		tb.Skipf("PGBOUNCER TESTS ARE SKIPPED: %v", b.err)
	case b.err != nil:
		tb.Fatalf("testdb: pgbouncer: %v", b.err)
	}
	through := *direct
	through.Host = b.addr
	return through.String()
}

// startBouncer starts a PgBouncer in front of a server, for all its databases.
func startBouncer(server *url.URL, settings string) (addr string, stop func(), err error) {
	program, err := findBouncer("/usr/sbin/pgbouncer")
	if err != nil {
		return "", nil, err
	}
	free, err := freeAddr()
	if err != nil {
		return "", nil, err
	}
	dir, err := os.MkdirTemp("", "coord-pgbouncer-")
	if err != nil {
		return "", nil, err
	}
	config := filepath.Join(dir, "pgbouncer.ini")
	password, given := server.User.Password()
	if given { // An empty one is a configuration error.
		password = " password='" + strings.ReplaceAll(password, "'", "''") + "'"
	}
	text := fmt.Sprintf(`[databases]
* = host=%s port=%s user=%s%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 40
max_client_conn = 1000
ignore_startup_parameters = extra_float_digits
verbose = 0
log_connections = 0
log_disconnections = 0
%s
`, server.Hostname(), server.Port(), server.User.Username(), password, free.Port, settings)
	user, err := unprivileged()
	if err == nil {
		err = os.WriteFile(config, []byte(text), 0o600)
	}
	if err == nil && user != nil {
		err = errors.Join(os.Chown(dir, int(user.Uid), int(user.Gid)), os.Chown(config, int(user.Uid), int(user.Gid)))
	}
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return runBouncer(program, dir, config, user, free)
}

// findBouncer also looks where Debian puts it, which is not on every PATH. It returns
// an [exec.ErrNotFound] if there is none: LookPath does so only for a name without a
// directory.
func findBouncer(debian string) (string, error) {
	program, err := exec.LookPath("pgbouncer")
	if err == nil {
		return program, nil
	}
	if _, absent := os.Stat(debian); absent != nil {
		return "", err
	}
	return exec.LookPath(debian)
}

// keepBouncer runs the program again when it ends by itself, as a service manager
// does: version 1.18 can die of a client that vanishes (its issue 801).
const keepBouncer = `
(trap 'kill $p; wait $p; exit' TERM; while :; do "$1" "$2" 3<&- & p=$!; wait $p; sleep 0.1; done) &
read -r _ <&3
kill $!; wait $!; cd / && rm -rf "$3"
`

// runBouncer runs it under a shell that ends it when the pipe closes whose other
// end only this process has: it outlives no test binary.
func runBouncer(program, dir, config string, user *syscall.Credential, addr *net.TCPAddr) (string, func(), error) {
	watched, pipe, err := os.Pipe()
	if err != nil {
		return "", nil, err
	}
	log := &tail{}
	cmd := exec.Command("sh", "-c", keepBouncer, "sh", program, config, dir)
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []*os.File{watched}, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: user}
	err = cmd.Start()
	watched.Close()
	if err != nil {
		pipe.Close()
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	stop := func() {
		pipe.Close()
		cmd.Wait()
		os.RemoveAll(dir)
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr.String())
		if err == nil {
			conn.Close()
			return addr.String(), stop, nil
		}
		select {
		case <-ctx.Done():
			stop()
			return "", nil, fmt.Errorf("not ready: %w: %s", err, log)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stopBouncers ends those that run.
func stopBouncers() {
	bouncers.mu.Lock()
	defer bouncers.mu.Unlock()
	for _, b := range bouncers.by {
		if b.stop != nil {
			b.stop()
		}
	}
}
