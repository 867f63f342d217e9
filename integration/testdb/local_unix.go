//go:build unix

package testdb

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lib/pq"
)

const (
	// portTries is how often a start is tried again because somebody else
	// took the port between our choosing it and the server's binding it.
	portTries = 3
	// stopTimeout is what a server gets to end by itself.
	stopTimeout = time.Minute
)

// supervisor is the shell script that makes the cluster and runs the server:
// sh -c supervisor sh directory bin options... It ends the server and removes
// the directory as soon as file 3 closes. That is a pipe whose other end only
// the test binary has, so that a server outlives no test binary, however that
// died.
const supervisor = `
dir=$1 bin=$2; shift 2
trap '' PIPE # The log goes to the test binary too: a word to it would end us.
"$bin/initdb" --pgdata="$dir/data" --username=postgres --pwfile="$dir/password" \
	--auth=scram-sha-256 --encoding=UTF8 --locale=C --no-sync >/dev/null 3<&- && {
	"$bin/postgres" -D "$dir/data" "$@" 3<&- &
	server=$!
	# Again and again: a server that only just started ignores the signal.
	{ read -r _; while kill -QUIT $server; do sleep 0.1; done; } <&3 >/dev/null 2>&1 &
	watch=$!
	wait $server
	kill $watch 2>/dev/null
}
cd / && rm -rf "$dir"
`

// onMachine starts a server with the programs of this machine. Its error is
// errAbsent if there are none.
func onMachine(ctx context.Context) (*server, error) {
	bin, err := programs(ctx)
	if err != nil {
		return nil, fmt.Errorf("server programs: %w: %w", errAbsent, err)
	}
	for try := 1; ; try++ {
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		srv, err := local(ctx, bin, addr)
		if err == nil {
			return srv, nil
		}
		if !portTaken(err) || try == portTries {
			return nil, fmt.Errorf("testdb: start the server in %s: %w", bin, err)
		}
	}
}

// programs is the directory of initdb, postgres and others.
func programs(ctx context.Context, others ...string) (string, error) {
	all := append([]string{"initdb", "postgres"}, others...)
	for _, dir := range candidates(ctx) {
		if !slices.ContainsFunc(all, func(name string) bool { return !executable(dir, name) }) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no %s on PATH, in pg_config --bindir or /usr/lib/postgresql", strings.Join(all, ", "))
}

func candidates(ctx context.Context) []string {
	dirs := filepath.SplitList(os.Getenv("PATH"))
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	// Debian's, which are on nobody's PATH. Glob sorts: the newest is the last.
	debian, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	slices.Reverse(debian)
	return append(dirs, debian...)
}

func executable(dir, name string) bool {
	_, err := exec.LookPath(filepath.Join(dir, name))
	return err == nil
}

// local makes a cluster and starts a server on it, which listens on addr.
func local(ctx context.Context, bin string, addr *net.TCPAddr) (*server, error) {
	c, err := newCluster(bin)
	if err != nil {
		return nil, err
	}
	srv, err := c.serve(addr)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.dir))
	}
	version, err := srv.ready(ctx, startTimeout)
	if err != nil {
		return nil, errors.Join(err, srv.stop())
	}
	srv.source = "local PostgreSQL " + version
	return srv, nil
}

// portTaken reports whether the server couldn't bind its port, or another one
// that has it turned our password down.
func portTaken(err error) bool {
	var refused *pq.Error
	if errors.As(err, &refused) {
		return refused.Code.Class() == "28" // invalid authorization
	}
	return strings.Contains(err.Error(), "could not create any TCP/IP sockets")
}

// cluster is the directory of a server and who runs the programs in it.
type cluster struct {
	bin      string
	dir      string
	password string
	owner    *syscall.Credential // nil: the caller
}

func newCluster(bin string) (*cluster, error) {
	owner, err := unprivileged()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "coord-testdb-")
	if err != nil {
		return nil, err
	}
	c := &cluster{bin: bin, dir: dir, password: rand.Text(), owner: owner}
	if err := c.prepare(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return c, nil
}

// unprivileged is who runs the server: Postgres refuses to be run by root.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("root may not run a server, and there is neither a user postgres nor a user nobody")
}

// prepare writes the password and gives the directory to its owner. There is a
// password because any user of this machine can connect to the port, and because
// of portTaken.
func (c *cluster) prepare() error {
	secret := filepath.Join(c.dir, "password")
	if err := os.WriteFile(secret, []byte(c.password), 0o600); err != nil {
		return err
	}
	return errors.Join(c.give(secret), c.give(c.dir))
}

func (c *cluster) give(path string) error {
	if c.owner == nil {
		return nil
	}
	return os.Chown(path, int(c.owner.Uid), int(c.owner.Gid))
}

// serve starts the server under its supervisor.
func (c *cluster) serve(addr *net.TCPAddr) (*server, error) {
	theirs, ours, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	log := new(tail)
	cmd := c.command(addr)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait() // How it ended is in the log.
	}()
	return &server{
		admin:  adminURL(addr.String(), c.password),
		stop:   sync.OnceValue(func() error { return c.stop(cmd.Process.Pid, ours, exited) }),
		exited: exited,
		log:    log,
	}, nil
}

// command is the supervisor, run by the owner, in the cluster's directory
// because the caller's may be closed to the owner, and without the caller's PG*
// variables.
func (c *cluster) command(addr *net.TCPAddr) *exec.Cmd {
	cmd := exec.Command("/bin/sh", "-c", supervisor, "sh", c.dir, c.bin,
		"-c", "listen_addresses="+addr.IP.String(),
		"-c", "port="+strconv.Itoa(addr.Port),
		"-c", "unix_socket_directories=") // Else in a folder that may not exist.
	for _, s := range settings {
		cmd.Args = append(cmd.Args, "-c", s)
	}
	cmd.Dir = c.dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
	// A group of its own: an interrupt from the keyboard is for the test
	// binary, which then ends the server in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.owner, Setpgid: true}
	return cmd
}

// stop lets go of the supervisor's pipe and waits until all is gone.
func (c *cluster) stop(group int, pipe *os.File, exited <-chan struct{}) error {
	err := pipe.Close()
	select {
	case <-exited:
	case <-time.After(stopTimeout):
		err = errors.Join(err, fmt.Errorf("testdb: the server did not end in %v", stopTimeout),
			syscall.Kill(-group, syscall.SIGKILL))
	}
	return errors.Join(err, os.RemoveAll(c.dir))
}

// freeAddr is a loopback address that nobody listens on.
func freeAddr() (*net.TCPAddr, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return l.Addr().(*net.TCPAddr), l.Close()
}
