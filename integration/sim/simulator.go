package sim

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// result is what the run of a seed has to say.
type result struct {
	Seed       uint64
	Nodes      int
	Statements int
	Met        int // calls that met a fault
	Late       int // requests that were served when their sender had left
	Seconds    float64
	Hash       uint64 // of all that has happened
	Faults     []string
	Wrong      []string
}

// totals is the sum of results.
type totals struct {
	seeds, statements, faults, met int
	virtual                        time.Duration
}

func (t *totals) add(r result) {
	t.seeds++
	t.statements += r.Statements
	t.faults += len(r.Faults)
	t.met += r.Met
	t.virtual += time.Duration(r.Seconds * float64(time.Second))
}

func (t totals) String() string {
	return fmt.Sprintf("%d seeds, %.1f virtual hours, %d statements, %d faults met by %d calls", t.seeds, t.virtual.Hours(), t.statements, t.faults, t.met)
}

// simulate runs the world of a seed, but for some of its faults.
func simulate(t *testing.T, seed uint64, without []int, verbose bool) (r result, lines []string) {
	p := newPlan(seed)
	r = result{Seed: seed, Nodes: len(p.nodes)}
	for i, f := range p.faults {
		if f.out = slices.Contains(without, i); !f.out {
			r.Faults = append(r.Faults, fmt.Sprintf("%d. %v", i, f))
		}
	}
	synctest.Test(t, func(t *testing.T) {
		seedRuntime(seed + 1)
		defer seedRuntime(0)
		w, err := newWorld(p, verbose)
		if err != nil {
			t.Fatal(err)
		}
		w.run()
		r.Statements, r.Met, r.Late, r.Hash, r.Wrong, lines = w.statements, w.meetings, w.late, w.hash, w.wrong, w.lines
		r.Seconds = w.now().Sub(w.began).Seconds()
	})
	return r, lines
}

// runWorlds runs seeds and prints a result for each, as a line of JSON. In this process nothing else runs.
func runWorlds(t *testing.T, from uint64, seeds int, without string, timeline bool) {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(-1) // It would preempt.
	var out []int
	for n := range strings.SplitSeq(without, ",") {
		if i, err := strconv.Atoi(n); err == nil {
			out = append(out, i)
		}
	}
	simulate(t, 0, nil, false) // What a process does only once is done here.
	for seed := from; seed < from+uint64(seeds); seed++ {
		runtime.GC()
		r, lines := simulate(t, seed, out, timeline)
		for _, line := range lines {
			fmt.Println(line)
		}
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println(string(text))
	}
}

// simulator runs worlds in processes of their own.
type simulator struct {
	t       *testing.T
	program string
}

// newSimulator builds the program, with a bug if root is not nil.
func newSimulator(t *testing.T, root []patch) *simulator {
	t.Helper()
	program, err := build(t.TempDir(), root)
	if err != nil {
		t.Fatal(err)
	}
	return &simulator{t, program}
}

// hung is how long a world may take: a virtual hour takes seconds.
const hung = 3 * time.Minute

// run runs some seeds in one process and calls each with every result, until that returns false.
func (s *simulator) run(from uint64, seeds int, each func(result) bool, flags ...string) {
	args := append([]string{"-test.run=^TestWorlds$", "-test.timeout=0", fmt.Sprint("-from=", from), fmt.Sprint("-seeds=", seeds)}, flags...)
	cmd := exec.Command(s.program, args...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	var output head
	cmd.Stderr = &output
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		s.t.Error(err)
		return
	}
	late := time.AfterFunc(hung, func() { _ = cmd.Process.Kill() })
	next := from
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<30)
	goes := true
	for goes && lines.Scan() {
		var r result
		if json.Unmarshal(lines.Bytes(), &r) != nil || r.Nodes == 0 {
			_, _ = output.Write(append(lines.Bytes(), '\n'))
			continue
		}
		late.Reset(hung)
		next = r.Seed + 1
		goes = each(r)
	}
	late.Stop()
	if !goes {
		_ = cmd.Process.Kill()
	}
	err = cmd.Wait()
	if goes && next < from+uint64(seeds) { // It hung, or has crashed.
		each(result{Seed: next, Wrong: []string{fmt.Sprintf("the world has not ended: %v\n%s", err, output.text)}})
	}
}

// head is the beginning of what a program prints, a few kilobytes.
type head struct {
	mu   sync.Mutex
	text []byte
}

func (t *head) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p[:min(len(p), 4096-len(t.text))]...)
	return len(p), nil
}

// world runs one seed.
func (s *simulator) world(seed uint64, without string) (got result) {
	s.run(seed, 1, func(r result) bool { got = r; return true }, "-without="+without)
	return got
}

// worlds runs seeds on all processors, so many or until a time, and calls each, one at a time, with every result,
// until that returns false.
func (s *simulator) worlds(from uint64, seeds int, until time.Time, each func(result) bool) {
	const chunk = 10
	var mu sync.Mutex
	var workers sync.WaitGroup
	next, goes := from, true
	for range runtime.NumCPU() {
		workers.Go(func() {
			for {
				mu.Lock()
				first, n := next, chunk
				if seeds > 0 {
					n = min(chunk, int(from+uint64(seeds)-next))
				}
				next += uint64(n)
				over := !goes || n == 0 || seeds == 0 && time.Now().After(until)
				mu.Unlock()
				if over {
					return
				}
				s.run(first, n, func(r result) bool {
					mu.Lock()
					defer mu.Unlock()
					if goes {
						goes = each(r) && (seeds > 0 || time.Now().Before(until))
					}
					return goes
				})
			}
		})
	}
	workers.Wait()
}

// explain reports a seed that failed, with the fewest of its faults that still make it fail, and the last events.
func (s *simulator) explain(r result) {
	var without []string
	for _, f := range r.Faults {
		number, _, _ := strings.Cut(f, ".")
		try := append(slices.Clone(without), number)
		if less := s.world(r.Seed, strings.Join(try, ",")); len(less.Wrong) > 0 {
			r, without = less, try
		}
	}
	out := strings.Join(without, ",")
	cmd := exec.Command(s.program, "-test.run=^TestWorlds$", fmt.Sprint("-from=", r.Seed), "-seeds=1", "-timeline", "-without="+out)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	text, _ := cmd.CombinedOutput()
	lines := strings.Split(string(text), "\n")
	end := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, "WRONG:") })
	if end < 0 {
		end = len(lines) - 1
	}
	s.t.Errorf("seed %d: %s\n\nThe faults that it takes:\n%s\n\nThe last events:\n%s\n\nAgain: make simulate SEEDS=1 FROM=%d",
		r.Seed, strings.Join(r.Wrong[:min(5, len(r.Wrong))], "\n"), strings.Join(r.Faults, "\n"), strings.Join(lines[max(0, end-40):end+1], "\n"), r.Seed)
}

// keptSeeds are those of seeds.txt, which have failed once.
func keptSeeds(t *testing.T) (seeds []uint64) {
	text, err := os.ReadFile("seeds.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if number, _, _ := strings.Cut(strings.TrimSpace(line), " "); number != "" && number != "#" {
			seed, err := strconv.ParseUint(number, 10, 64)
			if err != nil {
				t.Fatalf("seeds.txt: %v", err)
			}
			seeds = append(seeds, seed)
		}
	}
	return seeds
}
