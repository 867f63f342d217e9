package coord

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestRunPartitionsInvalid(t *testing.T) {
	d := &fakeDriver{answer: func(statement) (driver.Rows, error) { return nil, errors.New("nothing may be sent") }}
	c := newCoord(t, d, Config{})
	work := func(context.Context, Lease) error { return nil }
	good := PartitionConfig{Service: "web", Group: "jobs", Partitions: 3}
	for name, spoil := range map[string]func(*PartitionConfig){
		"no service":            func(cfg *PartitionConfig) { cfg.Service = "" },
		"no group":              func(cfg *PartitionConfig) { cfg.Group = "" },
		"NUL in the node":       func(cfg *PartitionConfig) { cfg.Node = "a\x00" },
		"address is no UTF-8":   func(cfg *PartitionConfig) { cfg.Address = "\xff" },
		"no partitions":         func(cfg *PartitionConfig) { cfg.Partitions = 0 },
		"negative partitions":   func(cfg *PartitionConfig) { cfg.Partitions = -1 },
		"short TTL":             func(cfg *PartitionConfig) { cfg.TTL = time.Microsecond },
		"negative TTL":          func(cfg *PartitionConfig) { cfg.TTL = -time.Second },
		"negative Heartbeat":    func(cfg *PartitionConfig) { cfg.Heartbeat = -time.Second },
		"Heartbeat over TTL/2":  func(cfg *PartitionConfig) { cfg.TTL, cfg.Heartbeat = 2*time.Second, 1001*time.Millisecond },
		"Heartbeat of defaults": func(cfg *PartitionConfig) { cfg.Heartbeat = 8 * time.Second },
	} {
		cfg := good
		spoil(&cfg)
		if err := c.RunPartitions(t.Context(), cfg, work); !errors.Is(err, ErrInvalid) {
			t.Errorf("RunPartitions with %s = %v, want ErrInvalid", name, err)
		}
	}
	if err := c.RunPartitions(t.Context(), good, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("RunPartitions without fn = %v, want ErrInvalid", err)
	}
	if err := c.RunLeader(t.Context(), "", 0, work); !errors.Is(err, ErrInvalid) {
		t.Errorf("RunLeader without a name = %v, want ErrInvalid", err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.RunPartitions(done, good, work); !errors.Is(err, context.Canceled) {
		t.Errorf("RunPartitions under a context that is done = %v, want context.Canceled", err)
	}
	c.Close()
	if err := c.RunPartitions(t.Context(), good, work); !errors.Is(err, ErrClosed) {
		t.Errorf("RunPartitions after Close = %v, want ErrClosed", err)
	}
	if sent := d.statements(); len(sent) > 0 {
		t.Errorf("%d statements were sent, want none: %v", len(sent), sent)
	}
}

func TestPartitionConfigDefaults(t *testing.T) {
	c := newCoord(t, &fakeDriver{}, Config{Owner: "me"})
	cfg := PartitionConfig{Service: "web", Group: "jobs", Partitions: 1}
	want := PartitionConfig{Service: "web", Node: "me", Group: "jobs", Partitions: 1, TTL: 15 * time.Second, Heartbeat: 5 * time.Second}
	if err := cfg.complete(c); err != nil || cfg != want {
		t.Errorf("complete = %+v, %v, want %+v", cfg, err, want)
	}
}

func TestShare(t *testing.T) {
	for _, test := range []struct {
		name, owners string   // a letter for each partition, "." is free
		members      string   // a letter for each member
		want         []string // for each member: its quota, and what is dealt to it
	}{
		{"first of all", "....", "a", []string{"4 [0 1 2 3]"}},
		{"all at once", ".......", "abc", []string{"3 [0 1 2]", "2 [3 4]", "2 [5 6]"}},
		{"a join", "aaaaabbbbb", "abc", []string{"4 []", "3 []", "3 []"}},
		{"a join, one moved", "aaaa.bbbbb", "abc", []string{"4 []", "3 []", "3 [4]"}},
		{"a join, the other was faster", "aaaaabbb..", "abc", []string{"4 []", "3 []", "3 [8 9]"}},
		{"a join that has no part", "abc", "abcd", []string{"1 []", "1 []", "1 []", "0 []"}},
		{"who has more keeps it", "abbcc", "abc", []string{"1 []", "2 []", "2 []"}},
		{"a leave", "aaab.bc..", "ab", []string{"5 [4 7]", "4 [8]"}},
		{"the dead still have theirs", "aabbxx", "ab", []string{"3 []", "3 []"}},
		{"more nodes than partitions", ".", "abc", []string{"1 [0]", "0 []", "0 []"}},
		{"a leader stays", "b", "abc", []string{"0 []", "1 []", "0 []"}},
	} {
		owners := strings.Split(test.owners, "")
		for i := range owners {
			owners[i] = strings.Trim(owners[i], ".")
		}
		members := strings.Split(test.members, "")
		for i, m := range members {
			quota, dealt := share(owners, members, m)
			if got := fmt.Sprint(quota, " ", dealt); got != test.want[i] {
				t.Errorf("%s: share of %s = %s, want %s", test.name, m, got, test.want[i])
			}
		}
	}
}

// TestShareProperty: from any state, whoever acts first and however far each gets
// before the next looks, shares end balanced, nothing that was dealt to one is dealt
// to another, and no more moves than must.
func TestShareProperty(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 0))
		owners, members := make([]string, 1+rng.IntN(20)), strings.Split("abcdefgh"[:1+rng.IntN(8)], "")
		for p := range owners {
			if k := rng.IntN(len(members) + 1); k < len(members) {
				owners[p] = members[k]
			}
		}
		want := mustMove(owners, members)
		if moved := converge(t, rng, owners, members); moved != want || t.Failed() {
			t.Fatalf("seed %d: %d partitions have moved, want %d", seed, moved, want)
		}
	}
}

// mustMove is how many owned partitions any balanced sharing has to move.
func mustMove(owners, members []string) (least int) {
	held := map[string]int{}
	for _, owner := range owners {
		held[owner]++
	}
	floor, more := len(owners)/len(members), len(owners)%len(members)
	for _, m := range members {
		if held[m] > floor {
			least += held[m] - floor
			if more > 0 {
				least, more = least-1, more-1
			}
		}
	}
	return least
}

// converge lets members act in random order, on a part of what share tells them,
// until nothing changes. It returns how many were given up.
func converge(t *testing.T, rng *rand.Rand, owners, members []string) (moved int) {
	for range 1000 {
		m := members[rng.IntN(len(members))]
		quota, dealt := share(owners, members, m)
		held := 0
		for p, owner := range owners {
			if owner == m {
				if held++; held > quota && rng.IntN(2) == 0 {
					owners[p], held, moved = "", held-1, moved+1
				}
			}
		}
		for _, p := range dealt[:rng.IntN(len(dealt)+1)] {
			if owners[p] != "" {
				t.Errorf("partition %d of %s is dealt to %s", p, owners[p], m)
			}
			owners[p] = m
		}
	}
	checkBalanced(t, owners, members)
	return moved
}

func checkBalanced(t *testing.T, owners, members []string) {
	t.Helper()
	var shares []int
	for _, m := range members {
		shares = append(shares, len(owners)-len(filter(owners, func(owner string) bool { return owner != m })))
	}
	if slices.Contains(owners, "") || slices.Max(shares)-slices.Min(shares) > 1 {
		t.Errorf("%v of %v: shares %v", owners, members, shares)
	}
}
