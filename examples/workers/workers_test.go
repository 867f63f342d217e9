//go:build unix

package main

import (
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// program is the built program, as it runs in a test: in a process group of its
// own, as a terminal would have it, with a temporary directory of its own.
type program struct {
	cmd  *exec.Cmd
	out  *os.File
	tmp  string
	done chan struct{}
}

// launch builds and starts the program.
func launch(t *testing.T, args ...string) *program {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "workers")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	p := &program{cmd: exec.Command(bin, args...), out: out, tmp: t.TempDir(), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), "TMPDIR="+p.tmp)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // the workers end with it
		<-p.done
		out.Close()
	})
	return p
}

// output is what the program has printed so far.
func (p *program) output(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(p.out.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// await waits until cond holds.
func (p *program) await(t *testing.T, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !cond(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s; output:\n%s", what, limit, p.output(t))
		}
	}
}

func (p *program) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// holding waits until all partitions are held: the workers are in full swing.
func (p *program) holding(t *testing.T) {
	t.Helper()
	p.await(t, 20*time.Second, "partitions held by all workers", func() bool {
		text := p.output(t)
		return strings.Contains(text, "w1 holds") && strings.Contains(text, "w2 holds") && strings.Contains(text, "w3 holds")
	})
}

// wantEnd checks how the program has ended: with this exit status, no worker left
// and no file left.
func (p *program) wantEnd(t *testing.T, status int) {
	t.Helper()
	if got := p.cmd.ProcessState.ExitCode(); got != status {
		t.Errorf("exit status %d, want %d; output:\n%s", got, status, p.output(t))
	}
	pids := regexp.MustCompile(`started w\d \(pid (\d+)\)`).FindAllStringSubmatch(p.output(t), -1)
	if len(pids) == 0 {
		t.Errorf("the output names no worker's pid:\n%s", p.output(t))
	}
	for _, match := range pids {
		pid, _ := strconv.Atoi(match[1])
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			t.Errorf("worker %d is left: kill(0) = %v", pid, err)
		}
	}
	if left, err := os.ReadDir(p.tmp); err != nil || len(left) > 0 {
		t.Errorf("the temporary directory has %v, %v, want nothing", left, err)
	}
}

// databases are the arguments that choose each database there is.
func databases() map[string][]string {
	all := map[string][]string{"sqlite": nil}
	if dsn := os.Getenv("COORD_TEST_DSN"); dsn != "" {
		all["postgres"] = []string{"-db", dsn}
	}
	return all
}

func TestRun(t *testing.T) {
	for name, args := range databases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := launch(t, append(args, "-for", "5s")...)
			p.await(t, 20*time.Second, "the end", p.ended)
			p.wantEnd(t, exitOK)
			for _, want := range []string{"with SIGKILL", "verdict: ok", "all 12 partitions were held"} {
				if text := p.output(t); !strings.Contains(text, want) {
					t.Errorf("the output lacks %q:\n%s", want, text)
				}
			}
			if text := p.output(t); strings.Contains(text, "\x1b") {
				t.Errorf("escape sequences though the output is a file: %q", text)
			}
		})
	}
}

// Ctrl-C in a terminal reaches every process of the group.
func TestInterrupt(t *testing.T) {
	for name, args := range databases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := launch(t, append(args, "-for", "1m", "-workers", "3")...)
			p.holding(t)
			if err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			p.await(t, 5*time.Second, "the end after SIGINT", p.ended)
			p.wantEnd(t, exitInterrupted)
			if strings.Contains(p.output(t), "verdict") {
				t.Errorf("a verdict after SIGINT:\n%s", p.output(t))
			}
		})
	}
}

func TestTerminate(t *testing.T) {
	t.Parallel()
	p := launch(t, "-for", "1m", "-workers", "3")
	p.holding(t)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.await(t, 5*time.Second, "the end after SIGTERM", p.ended)
	p.wantEnd(t, exitInterrupted)
}

// A parent that dies without a word takes its workers with it, and they release
// what they held.
func TestParentKilled(t *testing.T) {
	t.Parallel()
	p := launch(t, "-for", "1m", "-workers", "3")
	p.holding(t)
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(p.tmp, "*", "coord.db"))
	if err != nil || len(files) != 1 {
		t.Fatalf("databases = %v, %v, want one", files, err)
	}
	db, err := sql.Open("sqlite", files[0]+"?_pragma=busy_timeout(5000)")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	count := func(query string) (n int) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	p.await(t, 5*time.Second, "workers released and left", func() bool {
		return count("SELECT count(*) FROM workers_member") == 0 &&
			count("SELECT count(*) FROM workers_lease WHERE expires_at > 0") == 0
	})
	if rows := count("SELECT count(*) FROM workers_lease"); rows != 12 {
		t.Errorf("%d rows of leases, want 12", rows)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	p := launch(t, "-h")
	p.await(t, 5*time.Second, "the end", p.ended)
	text := p.output(t)
	if got := p.cmd.ProcessState.ExitCode(); got != exitOK {
		t.Errorf("exit status %d, want 0", got)
	}
	for _, want := range []string{"-db", "-workers", "-partitions", "-for", "SIGKILL"} {
		if !strings.Contains(text, want) {
			t.Errorf("-h does not mention %s:\n%s", want, text)
		}
	}
}
