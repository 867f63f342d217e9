package picture

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord/integration/history"
)

// run is a history in which w0 is killed and w1 takes over.
func run() []history.Event {
	const s = time.Second
	return []history.Event{
		{Kind: history.Acquire, Primitive: "lease", Key: "k0", Owner: "w0-0.1", Token: 1, At: 10 * s, Until: 12 * s},
		{Kind: history.Fault, Owner: "w0", Key: "killed", At: 11 * s},
		{Kind: history.Acquire, Primitive: "lease", Key: "k0", Owner: "w1-0.0", Token: 2, At: 12 * s, Until: 14 * s},
		{Kind: history.Release, Primitive: "lease", Key: "k0", Owner: "w1-0.0", Token: 2, At: 13 * s},
	}
}

func TestTimeline(t *testing.T) {
	drawn := FromHistory("a run", run())
	if drawn.Begin != 10*time.Second || drawn.End != 13*time.Second || len(drawn.Spans) != 2 || drawn.Spans[0].Owner != "w0" {
		t.Errorf("FromHistory = %+v", drawn)
	}
	expectTexts(t, drawn.Save, "a run", ">1<", ">2<", "w0 killed", "lease k0", ">w1<")
}

func TestHistogram(t *testing.T) {
	expectTexts(t, func(file string) error {
		return Histogram(file, "spread", "ms", 10, Series{"a", []float64{1, 2, 3, 3}}, Series{"b", []float64{9, 10}})
	}, "spread", ">ms<", ">b<")
}

func TestLines(t *testing.T) {
	expectTexts(t, func(file string) error {
		return Lines(file, "growth", "n", "per second", Line{"a", []float64{1, 10, 100}, []float64{5, 50, 400}})
	}, "growth", "per second", ">a<")
}

// expectTexts looks for texts in a picture.
func expectTexts(t *testing.T, save func(string) error, texts ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "picture.svg")
	if err := save(file); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range texts {
		if !strings.Contains(string(svg), want) {
			t.Errorf("the picture lacks %q", want)
		}
	}
}
