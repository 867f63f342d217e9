package main

import (
	"slices"
	"strings"
	"testing"
)

// good is a history in which every promise was kept: b is killed at 40 and leaves
// partitions 1 and 2, each claimed until 50.
func good() history {
	return history{
		Partitions: 3,
		Killed:     "b",
		KilledAt:   40,
		End:        100,
		Claims: []claim{
			{"a", 0, 1, 0, 110, true},
			{"a", 1, 1, 0, 10, true},
			{"a", 2, 4, 70, 105, true},
			{"b", 1, 2, 10, 50, false},
			{"b", 2, 1, 5, 20, true},
			{"b", 2, 3, 30, 50, false},
			{"c", 2, 2, 20, 30, true},
			{"c", 1, 3, 50, 120, true},
		},
	}
}

func TestCheckRight(t *testing.T) {
	if wrong := check(good()); len(wrong) > 0 {
		t.Errorf("check = %q, want nothing", wrong)
	}
	if got, want := takeoverText(good()), "partition 2: b at epoch 3, then a at epoch 4"; !strings.Contains(got, want) {
		t.Errorf("takeoverText = %q, want %q in it", got, want)
	}
}

func TestCheckWrong(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(h *history)
		want  []string // each the beginning of one finding, in order
	}{
		{"two at once", func(h *history) { h.Claims[7].From = 49 },
			[]string{"two at once: partition 1, b at epoch 2 from 0.000 s to 0.000 s, and partition 1, c at epoch 3", "no takeover"}},
		{"two at once, not neighbours", func(h *history) { h.Claims[4].To = 35 },
			[]string{"two at once: partition 2, b at epoch 1", "two at once: partition 2, b at epoch 1"}},
		{"one with itself", func(h *history) { h.Claims = append(h.Claims, claim{"a", 0, 2, 90, 110, true}) },
			[]string{"two at once: partition 0, a at epoch 1"}},
		{"same moment", func(h *history) { h.Claims = append(h.Claims, claim{"c", 0, 2, 0, 10, true}) },
			[]string{"two at once: partition 0"}},
		{"epoch goes back", func(h *history) { h.Claims[6].Epoch = 1; h.Claims[4].Epoch = 2 },
			[]string{"an epoch that did not grow: partition 2, b at epoch 2"}},
		{"epoch repeats", func(h *history) { h.Claims[3].Epoch = 1 },
			[]string{"an epoch that did not grow: partition 1, a at epoch 1"}},
		{"takeover at the same epoch", func(h *history) { h.Claims[7].Epoch = 2 },
			[]string{"an epoch that did not grow", "no takeover: partition 1, b at epoch 2"}},
		{"never held", func(h *history) { h.Claims = h.Claims[1:] },
			[]string{"partition 0 was never held"}},
		{"not held at the end", func(h *history) { h.Claims[0].To = 99 },
			[]string{"partition 0 was not held by a live worker at the end"}},
		{"held too late", func(h *history) { h.Claims[0].From = 101 },
			[]string{"partition 0 was not held by a live worker at the end"}},
		{"held at the end by the dead", func(h *history) { h.Claims[3].To = 120; h.Claims = h.Claims[:7] },
			[]string{"partition 1 was not held by a live worker at the end", "no takeover: partition 1"}},
		{"no takeover", func(h *history) { h.Claims = h.Claims[:7] },
			[]string{"partition 1 was not held by a live worker at the end", "no takeover: partition 1"}},
		{"no end on record", func(h *history) { h.Claims[0].Ended = false },
			[]string{"partition 0, a at epoch 1"}},
		{"nobody killed", func(h *history) { h.Killed = ""; h.Claims[3].Ended = true; h.Claims[5].Ended = true },
			[]string{"no worker was killed"}},
		{"killed while idle", func(h *history) { h.Claims[3].Ended = true; h.Claims[5].Ended = true },
			[]string{"b held nothing when it was killed"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := good()
			test.spoil(&h)
			wrong := check(h)
			if !slices.EqualFunc(wrong, test.want, strings.HasPrefix) {
				t.Errorf("check = %q, want %q", wrong, test.want)
			}
		})
	}
}

func TestParseRecord(t *testing.T) {
	got, err := parseRecord("a", []byte(`{"what":"start","partition":3,"epoch":2,"at":10,"until":50}
{"what":"start","partition":4,"epoch":1,"at":11,"until":51}
{"what":"extend","partition":3,"epoch":2,"at":20,"until":60}
{"what":"stop","partition":4,"epoch":1,"at":30,"until":29}
{"what":"start","partition":4,"epoch":3,"at":40,"until":80}
{"what":"extend","partition":3,"epoch":2,"at":45,"un`)) // killed as it wrote
	want := []claim{
		{"a", 3, 2, 10, 60, false},
		{"a", 4, 1, 11, 29, true},
		{"a", 4, 3, 40, 80, false},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("parseRecord = %v, %v, want %v", got, err, want)
	}
}

func TestParseRecordRefuses(t *testing.T) {
	const start = `{"what":"start","partition":3,"epoch":2,"at":10,"until":50}` + "\n"
	tests := map[string]string{
		"no JSON":             "start 3\n",
		"unknown entry":       `{"what":"pause","partition":3}` + "\n",
		"extend before start": `{"what":"extend","partition":3,"epoch":2}` + "\n",
		"stop before start":   `{"what":"stop","partition":3,"epoch":2}` + "\n",
		"start twice":         start + start,
		"another epoch":       start + `{"what":"extend","partition":3,"epoch":3}` + "\n",
	}
	for name, text := range tests {
		if claims, err := parseRecord("a", []byte(text)); err == nil {
			t.Errorf("%s: parseRecord = %v, want an error", name, claims)
		}
	}
}
