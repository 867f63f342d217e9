package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestImporter: a program that imports coord gets coord alone.
func TestImporter(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module example.test/importer\n\ngo 1.26\n\nreplace github.com/seed-4c80c132/coord => " + root + "\n",
		"main.go": "package main\n\nimport _ \"github.com/seed-4c80c132/coord\"\n\nfunc main() {}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go %s: %v", strings.Join(args, " "), err)
		}
		return strings.TrimSpace(string(out))
	}
	run("mod", "tidy")
	run("build", "-o", os.DevNull, ".")
	var required []string
	for line := range strings.Lines(run("mod", "edit", "-print")) {
		if strings.Contains(line, " v") && !strings.Contains(line, "=>") {
			required = append(required, strings.TrimSpace(line))
		}
	}
	if len(required) != 1 || !strings.Contains(required[0], "seed-4c80c132/coord ") {
		t.Errorf("go.mod requires %q, want coord alone", required)
	}
	sums, err := os.ReadFile(filepath.Join(dir, "go.sum"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	if n := strings.Count(string(sums), "\n"); n > 10 {
		t.Errorf("go.sum has %d lines, want at most 10:\n%s", n, sums)
	}
	for pkg := range strings.Lines(run("list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "github.com/seed-4c80c132/coord")) {
		if pkg = strings.TrimSpace(pkg); pkg != "" && pkg != "github.com/seed-4c80c132/coord" {
			t.Errorf("coord imports %s, want the standard library alone", pkg)
		}
	}
}
