//go:build unix

package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// output is what the program has printed so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(text []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(text)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// program is the built program, as it runs in a test: in a process group of its own,
// as a terminal would have it, with a temporary directory of its own.
func program(t *testing.T, args ...string) (cmd *exec.Cmd, out *output, tmp string) {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "leader")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	out, tmp = new(output), t.TempDir()
	cmd = exec.CommandContext(t.Context(), bin, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, out, tmp
}

// wantEnd checks how the program has ended: with this exit status, no process and no
// file left.
func wantEnd(t *testing.T, cmd *exec.Cmd, out *output, tmp string, status int) {
	t.Helper()
	if got := cmd.ProcessState.ExitCode(); got != status {
		t.Errorf("exit status %d, want %d; output:\n%s", got, status, out)
	}
	if err := syscall.Kill(-cmd.Process.Pid, 0); err != syscall.ESRCH {
		t.Errorf("a process of the group is left: kill(0) = %v", err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("the temporary directory has %v, %v, want nothing", left, err)
	}
}

func TestRun(t *testing.T) {
	databases := map[string][]string{"sqlite": nil}
	if dsn := os.Getenv("COORD_TEST_DSN"); dsn != "" {
		databases["postgres"] = []string{"-db", dsn}
	}
	for name, args := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, out, tmp := program(t, args...)
			_ = cmd.Run()
			wantEnd(t, cmd, out, tmp, exitOK)
			for _, want := range []string{"leads at epoch 1", "with SIGKILL", "leads at epoch 2", "is refused", "leads at epoch 3", "verdict: ok"} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("the output lacks %q:\n%s", want, out)
				}
			}
		})
	}
}

// Ctrl-C in a terminal reaches every process of the group.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	cmd, out, tmp := program(t)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); !strings.Contains(out.String(), "leads"); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no leader; output:\n%s", out)
		}
	}
	if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	wantEnd(t, cmd, out, tmp, exitInterrupted)
}

func TestCheck(t *testing.T) {
	for _, test := range []struct {
		name string
		rows []row
		want []string // each a part of one finding, in order
	}{
		{"right", []row{{"a", 1}, {"a", 1}, {"b", 2}, {"b", 4}}, nil},
		{"a stale write", []row{{"a", 1}, {"b", 2}, {"a", 1}}, []string{"a wrote at epoch 1 after b had at epoch 2"}},
		{"two leaders", []row{{"a", 1}, {"b", 1}, {"b", 2}}, []string{"a and b both wrote at epoch 1"}},
		{"no takeover", []row{{"a", 1}}, []string{"no takeover"}},
	} {
		if wrong := check(test.rows); !slices.EqualFunc(wrong, test.want, strings.Contains) {
			t.Errorf("%s: check = %q, want %q", test.name, wrong, test.want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, args := range []string{"extra", "-processes=1", "-processes=10", "-db=file.db", "-no-such"} {
		if opts, err := parse([]string{args}, io.Discard); err == nil {
			t.Errorf("parse(%s) = %+v, want an error", args, opts)
		}
	}
}
