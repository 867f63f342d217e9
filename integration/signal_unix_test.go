//go:build unix

package integration

import (
	"syscall"
	"testing"
)

// stop suspends a process, and resume lets it go on.
func stop(t *testing.T, p *process)   { t.Helper(); signal(t, p, syscall.SIGSTOP) }
func resume(t *testing.T, p *process) { t.Helper(); signal(t, p, syscall.SIGCONT) }

func signal(t *testing.T, p *process, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}
