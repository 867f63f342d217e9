package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// patch replaces text that occurs exactly once in a source file.
type patch struct{ file, old, new string }

// exactRuntime makes the standard library repeatable. While a seed is set, every random choice that a goroutine of a
// bubble makes comes from the seed: the case of a select, the order of a map, timers of the same instant, and
// math/rand/v2. Nothing preempts a goroutine, a context ends its children in the order in which they were made, and
// time passes although a goroutine waits for a mutex: database/sql holds one during each call of the driver.
// The paths are below GOROOT/src.
var exactRuntime = []patch{
	{"runtime/rand.go", "func rand() uint64 {\n", `func rand() uint64 {
	if simSeeded && getg().bubble != nil {
		return simNext()
	}
`},
	{"runtime/rand.go", "	globalRand.state.Init(*seed)\n", `	*seed = [32]byte{'c', 'o', 'o', 'r', 'd'} // The keys of all hashes.
	globalRand.state.Init(*seed)
`},
	{"runtime/rand.go", "//go:linkname maps_rand internal/runtime/maps.rand\n", `var (
	simSeeded bool
	simState  uint64
)

//go:linkname simSeed
func simSeed(seed uint64) {
	simSeeded, simState = seed != 0, seed
}

// simNext is SplitMix64.
//
//go:nosplit
func simNext() uint64 {
	simState += 0x9e3779b97f4a7c15
	z := simState
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

//go:linkname maps_rand internal/runtime/maps.rand
`},
	{"runtime/select.go", "		j := cheaprandn(uint32(norder + 1))\n", `		j := cheaprandn(uint32(norder + 1))
		if simSeeded && gp.bubble != nil {
			j = uint32(simNext() % uint64(norder+1))
		}
`},
	{"runtime/time.go", "			t.rand = cheaprand()\n", `			t.rand = cheaprand()
			if simSeeded {
				t.rand = uint32(simNext())
			}
`},
	{"runtime/runtime2.go", "	waitReasonSynctestSelect:        true,\n", `	waitReasonSynctestSelect:        true,
	waitReasonSyncMutexLock:         true,
	waitReasonSyncRWMutexLock:       true,
	waitReasonSyncRWMutexRLock:      true,
`},
	{"runtime/proc.go", "func preemptone(pp *p) bool {\n", `func preemptone(pp *p) bool {
	if simSeeded {
		return false
	}
`},
	{"runtime/proc.go", "func retake(now int64) uint32 {\n", `func retake(now int64) uint32 {
	if simSeeded {
		return 0
	}
`},
	{"runtime/sema.go", "func internal_sync_nanotime() int64 {\n", `func internal_sync_nanotime() int64 {
	if gp := getg(); simSeeded && gp.bubble != nil {
		return gp.bubble.now
	}
`},
	{"context/context.go", `	"internal/reflectlite"
`, `	"internal/reflectlite"
	"slices"
`},
	{"context/context.go", "	children map[canceler]struct{} ", "	made     int\n	children map[canceler]int "},
	{"context/context.go", "make(map[canceler]struct{})", "make(map[canceler]int)"},
	{"context/context.go", "p.children[child] = struct{}{}", "p.made++\n			p.children[child] = p.made"},
	{"context/context.go", `	for child := range c.children {
`, `	children := make([]canceler, 0, len(c.children))
	for child := range c.children {
		children = append(children, child)
	}
	slices.SortFunc(children, func(a, b canceler) int { return c.children[a] - c.children[b] })
	for _, child := range children {
`},
}

// build compiles the tests of this package to a program in dir, with the patched standard library and the patches of
// root, whose paths are below the root of the repository.
func build(dir string, root []patch) (program string, err error) {
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	source, err := filepath.Abs("../..")
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for _, from := range []struct {
		root    string
		patches []patch
	}{{filepath.Join(strings.TrimSpace(string(goroot)), "src"), exactRuntime}, {source, root}} {
		if err := apply(dir, from.root, from.patches, replace); err != nil {
			return "", err
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return "", err
	}
	program = filepath.Join(dir, "sim.test")
	out, err := exec.Command("go", "test", "-c", "-vet=off", "-tags=exact", "-overlay="+file, "-o", program, ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go test -c: %w\n%s", err, out)
	}
	return program, nil
}

// apply writes patched copies of files below root into dir, and adds them to replace.
func apply(dir, root string, patches []patch, replace map[string]string) error {
	for _, p := range patches {
		file := filepath.Join(root, p.file)
		from := file
		if patched, ok := replace[file]; ok {
			from = patched
		}
		text, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if n := bytes.Count(text, []byte(p.old)); n != 1 {
			return fmt.Errorf("%s has %d times, not once: %q", p.file, n, p.old)
		}
		to := filepath.Join(dir, strings.ReplaceAll(p.file, "/", "-"))
		if err := os.WriteFile(to, bytes.Replace(text, []byte(p.old), []byte(p.new), 1), 0o600); err != nil {
			return err
		}
		replace[file] = to
	}
	return nil
}
