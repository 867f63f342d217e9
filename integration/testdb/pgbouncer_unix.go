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

// bouncer is the one PgBouncer of this process, in transaction mode.
var bouncer struct {
	once sync.Once
	addr string
	stop func()
	err  error
}

// PgBouncer creates an empty database as Postgres does and returns a URL that leads
// to it through a PgBouncer in transaction mode. Without the program the test is
// skipped, and fails in CI.
func PgBouncer(tb testing.TB) string {
	tb.Helper()
	direct, err := url.Parse(Postgres(tb))
	if err != nil {
		tb.Fatal(err)
	}
	bouncer.once.Do(func() { bouncer.addr, bouncer.stop, bouncer.err = startBouncer(direct) })
	switch {
	case errors.Is(bouncer.err, exec.ErrNotFound) && os.Getenv("CI") != "true":
		tb.Skipf("PGBOUNCER TESTS ARE SKIPPED: %v", bouncer.err)
	case bouncer.err != nil:
		tb.Fatalf("testdb: pgbouncer: %v", bouncer.err)
	}
	through := *direct
	through.Host = bouncer.addr
	return through.String()
}

// startBouncer starts a PgBouncer in front of a server, for all its databases.
func startBouncer(server *url.URL) (addr string, stop func(), err error) {
	program, err := findBouncer()
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
`, server.Hostname(), server.Port(), server.User.Username(), password, free.Port)
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

// findBouncer also looks where Debian puts it, which is not on every PATH.
func findBouncer() (string, error) {
	if program, err := exec.LookPath("pgbouncer"); err == nil {
		return program, nil
	}
	return exec.LookPath("/usr/sbin/pgbouncer")
}

// runBouncer runs it under a shell that ends it when the pipe closes whose other
// end only this process has: it outlives no test binary.
func runBouncer(program, dir, config string, user *syscall.Credential, addr *net.TCPAddr) (string, func(), error) {
	watched, pipe, err := os.Pipe()
	if err != nil {
		return "", nil, err
	}
	log := &tail{}
	cmd := exec.Command("sh", "-c", `"$1" "$2" 3<&- & read -r _ <&3; kill $!; wait $!; cd / && rm -rf "$3"`, "sh", program, config, dir)
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

// stopBouncer ends it, if it runs.
func stopBouncer() {
	if bouncer.stop != nil {
		bouncer.stop()
	}
}
