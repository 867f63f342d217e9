//go:build unix

package testdb

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// One that took the port may say nothing or be another Postgres. Neither may be
// taken for ours.
func TestPortTaken(t *testing.T) {
	bin, err := programs(t.Context())
	if err != nil {
		t.Skip(err)
	}
	t.Setenv("TMPDIR", openDir(t))
	for _, test := range []struct {
		name   string
		occupy func(*testing.T) *net.TCPAddr
	}{
		{"by a silent program", func(t *testing.T) *net.TCPAddr {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			return l.Addr().(*net.TCPAddr)
		}},
		{"by another server", func(t *testing.T) *net.TCPAddr {
			addr, err := freeAddr()
			if err != nil {
				t.Fatal(err)
			}
			other, err := local(t.Context(), bin, addr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { other.stop() })
			return addr
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := local(t.Context(), bin, test.occupy(t))
			if err == nil || !portTaken(err) {
				t.Errorf("local = %v, want that the port is taken", err)
			}
		})
	}
}

func TestBrokenSettingIsReported(t *testing.T) {
	if _, err := programs(t.Context()); err != nil {
		t.Skip(err)
	}
	t.Setenv("TMPDIR", openDir(t))
	kept := settings
	t.Cleanup(func() { settings = kept })
	settings = append([]string{"no_such_setting=1"}, kept...)
	if _, err := onMachine(t.Context()); err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("onMachine = %v, want the server's own words", err)
	}
}

// openDir is a directory for temporary files that is empty when the test ends.
// Unlike t.TempDir's, its parents are open to the user who runs the server.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "coord-testdb-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
		os.RemoveAll(dir)
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}
