package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed-4c80c132/coord"
	"golang.org/x/term"
)

// view tells a person what happens. On a terminal the events scroll by above a
// table that is drawn in place; elsewhere each change is a line.
type view struct {
	mu      sync.Mutex
	out     io.Writer
	begin   time.Time
	inPlace bool
	color   bool
	table   string            // drawn last; the cursor is just below it
	holds   map[string]string // by worker, as told last in lines
}

const needWidth, needHeight = 80, 16

func newView(out *os.File) *view {
	v := &view{out: out, begin: time.Now(), holds: map[string]string{}}
	width, height, err := term.GetSize(int(out.Fd()))
	v.inPlace = err == nil && width >= needWidth && height >= needHeight && os.Getenv("TERM") != "dumb"
	v.color = v.inPlace && os.Getenv("NO_COLOR") == ""
	return v
}

// event tells something that stays on the screen.
func (v *view) event(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.print(v.now() + fmt.Sprintf(format, args...) + "\n")
}

func (v *view) now() string { return fmt.Sprintf("%5.1f s  ", time.Since(v.begin).Seconds()) }

// print writes text in place of the table, and the table again below it, in one
// write, so that nothing flickers.
func (v *view) print(text string) {
	io.WriteString(v.out, v.wipe()+text+v.table)
}

// wipe takes the table off the screen.
func (v *view) wipe() string {
	if v.table == "" {
		return ""
	}
	return fmt.Sprintf("\r\x1b[%dA\x1b[J", strings.Count(v.table, "\n"))
}

// show tells who holds what.
func (v *view) show(workers []*process, partitions int, leases []coord.Lease) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.inPlace {
		old := v.wipe()
		v.table = v.draw(workers, partitions, leases)
		io.WriteString(v.out, old+v.table)
		return
	}
	for _, w := range workers {
		if holds := list(heldBy(w.name, leases)); holds != v.holds[w.name] {
			v.holds[w.name] = holds
			v.print(v.now() + w.name + " holds " + cmp.Or(holds, "nothing") + "\n")
		}
	}
}

// list is leases in a line: partition@epoch.
func list(leases []coord.Lease) string {
	var words []string
	for _, l := range leases {
		words = append(words, fmt.Sprintf("%d@%d", l.Partition, l.Epoch))
	}
	return strings.Join(words, " ")
}

// draw is the table: a row per worker, a column per partition, epochs in the cells.
func (v *view) draw(workers []*process, partitions int, leases []coord.Lease) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%spartition", v.now())
	for p := range partitions {
		fmt.Fprintf(&b, "%4d", p)
	}
	b.WriteString("\n")
	for _, w := range workers {
		state, color := "alive", green
		if w.killed {
			state, color = "killed", red
		}
		b.WriteString(v.paint(color, fmt.Sprintf("  %-4s%-12s", w.name, state)))
		for p := range partitions {
			b.WriteString(v.cell(color, p, heldBy(w.name, leases)))
		}
		b.WriteString("\n")
	}
	b.WriteString("  A number: the epoch at which the worker holds the partition.\n")
	return b.String()
}

const green, red = "32", "31"

func (v *view) cell(color string, partition int, leases []coord.Lease) string {
	i := slices.IndexFunc(leases, func(l coord.Lease) bool { return l.Partition == partition })
	if i < 0 {
		return "   ."
	}
	return v.paint(color, fmt.Sprintf("%4d", leases[i].Epoch))
}

func (v *view) paint(color, text string) string {
	if !v.color {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// end tells something below the table, which stays on the screen as it is.
func (v *view) end(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.table = ""
	v.print("\n" + text)
}

// verdict tells the result of check.
func (v *view) verdict(h history, wrong []string) {
	if len(wrong) > 0 {
		v.end(v.paint(red, "verdict: VIOLATED") + "\n  " + strings.Join(wrong, "\n  ") + "\n")
		return
	}
	v.end(v.paint(green, "verdict: ok") + ", by the workers' own records of " + fmt.Sprint(len(h.Claims)) + " claims\n" +
		"  no partition was ever worked on by two workers at once\n" +
		"  every claim has a larger epoch than all before it on its partition\n" +
		"  " + takeoverText(h) + "\n" +
		fmt.Sprintf("  all %d partitions were held by live workers at the end\n", h.Partitions))
}

// takeoverText tells who has what the killed worker held.
func takeoverText(h history) string {
	var moves []string
	var longest time.Duration
	for _, c := range h.left() {
		claims := h.partition(c.Partition)
		next := claims[slices.IndexFunc(claims, func(next claim) bool { return h.tookOver(c, next) })]
		moves = append(moves, fmt.Sprintf("\n    partition %d: %s at epoch %d, then %s at epoch %d", c.Partition, c.Worker, c.Epoch, next.Worker, next.Epoch))
		longest = max(longest, next.From-h.KilledAt)
	}
	return fmt.Sprintf("what %s held was taken over within %.1f s of the kill:%s", h.Killed, longest.Seconds(), strings.Join(moves, ""))
}
