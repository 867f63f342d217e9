package main

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// claim is one stretch of time in which a worker worked on a partition, by its own
// record.
type claim struct {
	Worker    string
	Partition int
	Epoch     int64
	From, To  time.Duration // by the shared clock
	// Ended is false if the worker was killed. To is then when the last piece of
	// work that it had put on record would have been done.
	Ended bool
}

// history is what the workers did in a run, to be judged by check.
type history struct {
	Partitions int
	Claims     []claim
	Begin      time.Duration // when the run began; texts count from it
	Killed     string        // the worker that was killed; "" if none was
	KilledAt   time.Duration
	End        time.Duration // when the workers that were left were told to stop
}

// check returns what is wrong with h, in words; nothing if every promise was kept.
func check(h history) []string {
	var wrong []string
	for p := range h.Partitions {
		claims := h.partition(p)
		wrong = slices.Concat(wrong, h.overlaps(claims), h.epochs(claims), h.atEnd(p, claims), h.takeovers(claims))
	}
	for _, c := range h.Claims {
		if !c.Ended && c.Worker != h.Killed {
			wrong = append(wrong, h.text(c)+" has no end on record, though it was not killed")
		}
	}
	switch {
	case h.Killed == "":
		wrong = append(wrong, "no worker was killed, so no takeover was seen")
	case len(h.left()) == 0:
		wrong = append(wrong, h.Killed+" held nothing when it was killed, so no takeover was seen")
	}
	return wrong
}

// partition returns the claims on p in the order in which they began.
func (h history) partition(p int) []claim {
	claims := slices.DeleteFunc(slices.Clone(h.Claims), func(c claim) bool { return c.Partition != p })
	slices.SortStableFunc(claims, func(a, b claim) int { return cmp.Compare(a.From, b.From) })
	return claims
}

// left returns the claims that the killed worker left open, by partition.
func (h history) left() []claim {
	left := slices.DeleteFunc(slices.Clone(h.Claims), func(c claim) bool { return c.Worker != h.Killed || c.Ended })
	slices.SortFunc(left, func(a, b claim) int { return cmp.Compare(a.Partition, b.Partition) })
	return left
}

// overlaps finds a claim that began before another on the partition was over: not
// only the one just before it, for a long one may reach over several.
func (h history) overlaps(claims []claim) (wrong []string) {
	for i, c := range claims {
		for _, before := range claims[:i] {
			if c.From < before.To {
				wrong = append(wrong, fmt.Sprintf("two at once: %s, and %s", h.text(before), h.text(c)))
			}
		}
	}
	return wrong
}

func (h history) epochs(claims []claim) (wrong []string) {
	for i, c := range claims {
		if i > 0 && c.Epoch <= claims[i-1].Epoch {
			wrong = append(wrong, fmt.Sprintf("an epoch that did not grow: %s, and then %s", h.text(claims[i-1]), h.text(c)))
		}
	}
	return wrong
}

// atEnd checks that a worker that lived was at work on p when the run ended.
func (h history) atEnd(p int, claims []claim) []string {
	if len(claims) == 0 {
		return []string{fmt.Sprintf("partition %d was never held", p)}
	}
	if !slices.ContainsFunc(claims, func(c claim) bool { return c.Worker != h.Killed && c.From <= h.End && h.End <= c.To }) {
		return []string{fmt.Sprintf("partition %d was not held by a live worker at the end, %s", p, h.since(h.End))}
	}
	return nil
}

// takeovers checks that what the killed worker left open went to another, with a
// larger epoch.
func (h history) takeovers(claims []claim) (wrong []string) {
	for i, c := range claims {
		if c.Worker != h.Killed || c.Ended {
			continue
		}
		if !slices.ContainsFunc(claims[i+1:], func(next claim) bool { return h.tookOver(c, next) }) {
			wrong = append(wrong, fmt.Sprintf("no takeover: %s was killed at %s, and no other took it at a larger epoch", h.text(c), h.since(h.KilledAt)))
		}
	}
	return wrong
}

func (h history) tookOver(c, next claim) bool {
	return next.Partition == c.Partition && next.Worker != c.Worker && next.Epoch > c.Epoch && next.From >= c.To
}

// text names a claim.
func (h history) text(c claim) string {
	return fmt.Sprintf("partition %d, %s at epoch %d from %s to %s", c.Partition, c.Worker, c.Epoch, h.since(c.From), h.since(c.To))
}

// since is a time of the run for a person.
func (h history) since(t time.Duration) string { return fmt.Sprintf("%.3f s", (t - h.Begin).Seconds()) }
