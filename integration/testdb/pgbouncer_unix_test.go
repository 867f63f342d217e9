//go:build unix

package testdb

import (
	"errors"
	"os/exec"
	"path/filepath"
	"testing"
)

// A machine without PgBouncer skips its tests: that it is absent must be told from
// that it does not start.
func TestNoPgBouncer(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	program, err := findBouncer(filepath.Join(t.TempDir(), "pgbouncer"))
	if !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("findBouncer = %q, %v, want ErrNotFound", program, err)
	}
}
