package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestDraw(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.svg")
	h := history{
		Partitions: 1, Begin: 5 * time.Second, Killed: "w1", KilledAt: 6 * time.Second, End: 9 * time.Second,
		Claims: []claim{
			{Worker: "w1", Partition: 0, Epoch: 41, From: 5 * time.Second, To: 7 * time.Second},
			{Worker: "w2", Partition: 0, Epoch: 42, From: 8 * time.Second, To: 9 * time.Second, Ended: true},
		},
	}
	if err := draw(h, file); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"partition 0", ">41<", ">42<", "w1 killed", ">w2<"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("the picture lacks %q", want)
		}
	}
}
