package sim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

var (
	seeds    = flag.Int("seeds", 0, "how many seeds; 0 is as many as -for allows")
	from     = flag.Uint64("from", 0, "the first seed; 0 is a new one each time")
	span     = flag.Duration("for", 5*time.Second, "how long to go on with new seeds")
	without  = flag.String("without", "", "numbers of the faults to leave out, with commas")
	timeline = flag.Bool("timeline", false, "print the timeline")
	bugs     = flag.String("bugs", "", "names of the seeded bugs to find, with commas, or all")
	patience = flag.Duration("patience", 10*time.Minute, "how long to look for a seeded bug")
)

// TestWorlds runs worlds in this process, which must be one that [build] has made.
func TestWorlds(t *testing.T) {
	if !exact {
		t.Skip("run by TestSimulation, with an exact runtime")
	}
	runWorlds(t, *from, *seeds, *without, *timeline)
}

func skipExact(t *testing.T) {
	t.Helper()
	if exact {
		t.Skip("only the worlds need an exact runtime")
	}
}

// TestSimulation runs the seeds that have failed once, and then others.
func TestSimulation(t *testing.T) {
	skipExact(t)
	s := newSimulator(t, nil)
	var total totals
	began := time.Now()
	for _, seed := range keptSeeds(t) {
		if r := s.world(seed, ""); len(r.Wrong) > 0 {
			s.explain(r)
		}
	}
	first := *from
	if first == 0 {
		first = rand.Uint64N(1 << 40)
	}
	until := time.Now().Add(*span)
	s.worlds(first, *seeds, until, func(r result) bool {
		total.add(r)
		if len(r.Wrong) > 0 {
			s.explain(r)
		}
		if total.seeds%1000 == 0 {
			t.Logf("%v: %s", time.Since(began).Round(time.Second), total)
		}
		return !t.Failed()
	})
	t.Logf("seeds from %d: %s, in %v", first, total, time.Since(began).Round(time.Second))
	if total.seeds == 0 || total.faults == 0 {
		t.Error("nothing was simulated")
	}
}

// TestExact runs seeds twice, one after another and each in a process of its own: nothing differs.
func TestExact(t *testing.T) {
	skipExact(t)
	s := newSimulator(t, nil)
	first := rand.Uint64N(1 << 40)
	s.worlds(first, 8, time.Time{}, func(r result) bool {
		again := s.world(r.Seed, "")
		if again.Hash != r.Hash || again.Statements != r.Statements {
			t.Errorf("seed %d: %d statements, hash %x; and again: %d, %x", r.Seed, r.Statements, r.Hash, again.Statements, again.Hash)
		}
		return true
	})
}

// TestBugs finds each of the seeded bugs by random seeds. Without -bugs it finds two, and sees that the others can be
// put in.
func TestBugs(t *testing.T) {
	skipExact(t)
	for i, m := range mutants {
		wanted := *bugs == "all" || strings.Contains(","+*bugs+",", ","+m.name+",")
		t.Run(m.name, func(t *testing.T) {
			if !wanted && (*bugs != "" || i%(len(mutants)/2) != 1) {
				if err := apply(t.TempDir(), "../..", m.patches, map[string]string{}); err != nil {
					t.Error(err)
				}
				return
			}
			s := newSimulator(t, m.patches)
			began, total, found := time.Now(), totals{}, ""
			s.worlds(1, 0, began.Add(*patience), func(r result) bool {
				total.add(r)
				if len(r.Wrong) > 0 {
					found = fmt.Sprintf("seed %d: %s", r.Seed, r.Wrong[0])
				}
				return found == ""
			})
			if found == "" {
				t.Fatalf("not found in %s: %s", total, m.what)
			}
			t.Logf("found after %v and %d seeds: %s", time.Since(began).Round(time.Second/10), total.seeds, found)
		})
	}
}
