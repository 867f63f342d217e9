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
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Cluster is a server that a test has to itself, made with the server programs of
// this machine: it may restart it, stop it, and promote its standby.
type Cluster struct {
	cluster
	data string
	addr *net.TCPAddr
}

// guardian ends every server in a directory and removes it, as soon as file 3
// closes: a server outlives no test binary, however that died.
const guardian = `
read -r _ <&3
for data in "$1"/data*; do "$2/pg_ctl" -D "$data" -m immediate -s stop; done >/dev/null 2>&1
cd / && rm -rf "$1"
`

// NewCluster makes and starts a server, with further settings ("name=value").
// Without the programs the test is skipped, and fails in CI.
func NewCluster(tb testing.TB, settings ...string) *Cluster {
	tb.Helper()
	bin, err := programs(tb.Context(), "pg_ctl", "pg_basebackup")
	if err != nil && os.Getenv("CI") != "true" {
		tb.Skipf("testdb: %v", err)
	}
	if err != nil {
		tb.Fatalf("testdb: %v", err)
	}
	made, err := newCluster(bin)
	if err != nil {
		tb.Fatalf("testdb: %v", err)
	}
	c := &Cluster{cluster: *made, data: filepath.Join(made.dir, "data")}
	tb.Cleanup(c.guard(tb))
	c.run(tb, "initdb", "--pgdata="+c.data, "--username=postgres", "--pwfile="+filepath.Join(c.dir, "password"),
		"--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync")
	c.Configure(tb, settings...)
	c.first(tb)
	return c
}

// guard starts the guardian and returns what sets it off.
func (c *Cluster) guard(tb testing.TB) func() {
	tb.Helper()
	theirs, ours, err := os.Pipe()
	if err != nil {
		tb.Fatal(err)
	}
	defer theirs.Close()
	cmd := exec.Command("/bin/sh", "-c", guardian, "sh", c.dir, c.bin)
	cmd.ExtraFiles, cmd.Dir = []*os.File{theirs}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.owner, Setpgid: true}
	if err := cmd.Start(); err != nil {
		tb.Fatal(errors.Join(err, ours.Close(), os.RemoveAll(c.dir)))
	}
	return func() {
		ours.Close()
		cmd.Wait()
		os.RemoveAll(c.dir)
	}
}

// Configure appends settings, which are read at the next start.
func (c *Cluster) Configure(tb testing.TB, settings ...string) {
	tb.Helper()
	file, err := os.OpenFile(filepath.Join(c.data, "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		tb.Fatal(err)
	}
	for _, setting := range settings {
		name, value, _ := strings.Cut(setting, "=")
		_, failed := fmt.Fprintf(file, "%s = '%s'\n", name, strings.ReplaceAll(value, "'", "''"))
		err = errors.Join(err, failed)
	}
	if err := errors.Join(err, file.Close()); err != nil {
		tb.Fatal(err)
	}
}

// first gives the server a port that is free and starts it.
func (c *Cluster) first(tb testing.TB) {
	tb.Helper()
	addr, err := freeAddr()
	if err != nil {
		tb.Fatal(err)
	}
	c.addr = addr
	own := append([]string{"listen_addresses=" + addr.IP.String(), "port=" + strconv.Itoa(addr.Port), "unix_socket_directories="}, settings...)
	c.Configure(tb, own...)
	c.Start(tb)
}

// control runs pg_ctl and waits for it.
func (c *Cluster) control(tb testing.TB, args ...string) {
	tb.Helper()
	c.run(tb, "pg_ctl", append([]string{"-D", c.data, "-l", filepath.Join(c.dir, "log"), "-w", "-t", "150", "-s"}, args...)...)
}

// run runs one of the server programs as the server's user.
func (c *Cluster) run(tb testing.TB, program string, args ...string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	out, err := os.CreateTemp("", "coord-testdb-out-") // A pipe would stay open as long as the server.
	if err != nil {
		tb.Fatal(err)
	}
	defer os.Remove(out.Name())
	defer out.Close()
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, program), args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.dir, out, out
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC", "PGPASSWORD=" + c.password}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.owner, Setpgid: true}
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(out.Name())
		log, _ := os.ReadFile(filepath.Join(c.dir, "log"))
		tb.Fatalf("testdb: %s %q: %v\n%s%s", program, args, err, said, log)
	}
}

// URL is that of the server's maintenance database.
func (c *Cluster) URL() string { return adminURL(c.addr.String(), c.password).String() }

// Restart ends the server as a crash does and starts it again: it recovers.
func (c *Cluster) Restart(tb testing.TB) { tb.Helper(); c.control(tb, "-m", "immediate", "restart") }

// Start starts the server and waits until it answers.
func (c *Cluster) Start(tb testing.TB) { tb.Helper(); c.control(tb, "start") }

// Stop ends the server as a crash does.
func (c *Cluster) Stop(tb testing.TB) { tb.Helper(); c.control(tb, "-m", "immediate", "stop") }

// Promote makes a standby a primary.
func (c *Cluster) Promote(tb testing.TB) { tb.Helper(); c.control(tb, "promote") }

// Standby makes and starts a server that follows c, which it reaches at an address,
// such as that of a proxy before it; "" is c's own.
func (c *Cluster) Standby(tb testing.TB, at string, settings ...string) *Cluster {
	tb.Helper()
	standby := &Cluster{cluster: c.cluster, data: filepath.Join(c.dir, fmt.Sprintf("data%d", c.addr.Port))}
	u, err := url.Parse(c.URL())
	if err != nil {
		tb.Fatal(err)
	}
	if at != "" {
		u.Host = at
	}
	c.run(tb, "pg_basebackup", "-d", u.String(), "-D", standby.data, "-R", "-X", "stream", "-c", "fast", "--no-sync")
	standby.Configure(tb, settings...)
	standby.first(tb)
	return standby
}
