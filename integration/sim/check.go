package sim

import (
	"context"
	"database/sql/driver"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// hold is what an honest user holds, from its grant until it gives it up, is told that it is lost, or has to believe so.
type hold struct {
	w     *world
	name  string
	user  *user
	token int64
	from  time.Time
	over  bool
}

// grant notes that a user was granted something that nobody else may hold, under a token that is larger than before, which
// was the largest when it asked.
func (w *world) grant(name string, u *user, token, before int64) *hold {
	h := &hold{w: w, name: name, user: u, token: token, from: w.now()}
	w.note("%s holds %s, token %d", u.id, name, token)
	if other := w.holds[name]; other != nil && !w.skewed {
		w.fail("two hold %s: %s with token %d, and since %v %s with token %d", name, u.id, token, other.from.Sub(w.began), other.user.id, other.token)
	} else if other != nil { // Clocks differ: it must hear of it.
		time.AfterFunc(w.ttl+w.timeout, func() {
			if !other.over {
				w.fail("%s was granted to %s at %v, and %s still has not lost it", name, u.id, h.from.Sub(w.began), other.user.id)
			}
		})
	}
	if token <= before {
		w.fail("%s was granted to %s with token %d after %d", name, u.id, token, before)
	}
	w.holds[name], w.tokens[name] = h, max(token, w.tokens[name])
	return h
}

// regrant is grant for a partition, whose work may be started again under the same lease.
func (w *world) regrant(name string, u *user, token int64) *hold {
	if h := w.holds[name]; h != nil && h.user == u && h.token == token {
		return h
	}
	return w.grant(name, u, token, w.tokens[name])
}

func (h *hold) end() {
	if h.over {
		return
	}
	h.over = true
	h.w.freed[h.name] = h.w.now()
	h.w.note("%s gives up %s", h.user.id, h.name)
	if h.w.holds[h.name] == h {
		delete(h.w.holds, h.name)
	}
}

// lost notes that a user was told of a loss, which nothing but a fault may bring about.
func (w *world) lost(h *hold) {
	if h.over {
		return
	}
	h.end()
	if u := h.user; w.calm(heavily, w.ttl) && w.weight[slowly] <= 1 && w.weight[slowly]*w.weight[lightly] == 0 && !w.skewed && !u.closed && !u.crashed {
		w.fail("%s lost %s, and nothing had been disturbed for %v", u.id, h.name, w.now().Sub(w.since(lightly)))
	}
}

// wait is a caller that waits for names.
type wait struct {
	names []string
	since time.Time
}

func (w *world) wait(name string, ctx context.Context) (done func()) {
	return w.waitAll([]string{name}, ctx)
}

// waitAll notes that a caller waits for names until ctx ends or it is done.
func (w *world) waitAll(names []string, ctx context.Context) (done func()) {
	x := &wait{names, w.now()}
	w.waiting = append(w.waiting, x)
	leave := func() { w.waiting = slices.DeleteFunc(w.waiting, func(y *wait) bool { return y == x }) }
	stop := context.AfterFunc(ctx, leave)
	return func() { stop(); leave() }
}

// monitor looks whether everything goes on.
func (w *world) monitor(stop <-chan struct{}) {
	idle := map[string]time.Time{}
	for {
		select {
		case <-stop:
			return
		case <-time.After(500 * time.Millisecond):
		}
		if w.skewed {
			continue
		}
		w.checkPartitions(idle)
		w.checkWaiting()
		w.checkRows()
	}
}

// lasts returns for how long something has been so.
func (w *world) lasts(idle map[string]time.Time, name string, so bool) time.Duration {
	switch from, known := idle[name]; {
	case !so:
		delete(idle, name)
	case !known:
		idle[name] = w.now()
	default:
		return w.now().Sub(from)
	}
	return 0
}

// checkPartitions: every partition is worked on within TTL and a Heartbeat of a fault's end.
func (w *world) checkPartitions(idle map[string]time.Time) {
	for _, g := range w.groups {
		runs := 0
		for _, p := range w.procs {
			if p.runs[g.name] && !p.crashed && !p.closed && p.life.Err() == nil {
				runs++
			}
		}
		for i := range g.partitions {
			name := workName(g, i)
			bound := w.ttl + w.ttl/3 + 2*time.Second
			if w.working[name] > 0 { // By an fn that goes on: another node takes it when it has been free for a TTL.
				bound += w.ttl
			}
			if d := w.lasts(idle, name, runs > w.working[name] && w.holds[name] == nil); d > bound && w.calm(lightly, bound) {
				w.fail("nobody works on %s for %v, and nothing was disturbed for %v", name, d, w.now().Sub(w.since(lightly)))
				idle[name] = w.now()
			}
		}
	}
}

// checkWaiting: what nobody holds is granted to somebody who waits.
func (w *world) checkWaiting() {
	bound := 2*w.timeout + 2*time.Second
	if !w.calm(lightly, w.ttl+bound) { // What a fault has left has expired then.
		return
	}
	for _, x := range w.waiting {
		since := x.since
		if calm := w.since(lightly).Add(w.ttl); calm.After(since) {
			since = calm
		}
		for _, name := range x.names {
			if w.holds[name] != nil {
				since = w.now()
			}
			if freed := w.freed[name]; freed.After(since) {
				since = freed
			}
		}
		if d := w.now().Sub(since); d > bound {
			w.fail("%s is free and waited for since %v, and nothing was disturbed for %v", strings.Join(x.names, " "), d, w.now().Sub(w.since(lightly)))
			x.since = w.now()
		}
	}
}

// liveRows are statements for what is held: kind, name and token of each row.
var liveRows = []struct{ table, text string }{
	{"coord_mutex", "SELECT 'mutex/' || name, fence, expires_at FROM coord_mutex WHERE expires_at > ?1"},
	{"coord_eidlock", "SELECT 'ids/' || eid, fence, expires_at FROM coord_eidlock WHERE expires_at > ?1"},
	{"coord_lease", "SELECT CASE group_name WHEN 'by hand' THEN 'lease/' || partition ELSE 'run/' || group_name || '/' || partition END, epoch, expires_at FROM coord_lease WHERE expires_at > ?1"},
}

// checkRows: a row that was granted or renewed while all was well, or almost, is somebody's, or is soon released.
func (w *world) checkRows() {
	if !w.calm(slowly, w.timeout) {
		clear(w.unheld)
		return
	}
	seen := map[string]bool{}
	for _, rows := range liveRows {
		if !w.srv.has(rows.table) {
			continue
		}
		got, err := w.srv.exec(rows.text, []driver.NamedValue{{Value: w.now().UnixMicro()}})
		w.must(got, err)
		for _, row := range got.rows {
			name, token, expires := row[0].(string), row[1].(int64), time.UnixMicro(row[2].(int64))
			if h := w.holds[name]; h != nil && h.token == token || w.working[name] > 0 || !expires.Add(-w.ttl).After(w.since(slowly).Add(w.timeout)) {
				continue
			}
			id := fmt.Sprint(name, " ", token)
			seen[id] = true
			switch since, known := w.unheld[id]; {
			case !known:
				w.unheld[id] = w.now()
			case w.now().Sub(since) > 3*w.timeout:
				w.fail("the row of %s, token %d, has been nobody's since %v", name, token, since.Sub(w.began))
				w.unheld[id] = w.now()
			}
		}
	}
	maps.DeleteFunc(w.unheld, func(id string, _ time.Time) bool { return !seen[id] })
}

// ask notes that a process sends an acquisition, and returns what to call when the driver returns. There is one at a time
// for a name, or one in each Timeout if the driver does not return.
func (w *world) ask(p *process, name string, args []driver.NamedValue) (answered func()) {
	switch name {
	case "mutex.acquire":
		name = fmt.Sprint(p.name, " mutex ", args[0].Value)
	case "lease.acquire":
		name = fmt.Sprint(p.name, " lease ", args[0].Value, args[1].Value)
	case "eidlock.acquire":
		name = fmt.Sprint(p.name, " ids ", args[2].Value)
	default:
		return func() {}
	}
	now := w.now()
	if slices.ContainsFunc(w.asked[name], func(at time.Time) bool { return now.Sub(at) < w.timeout-w.timeout/10 }) && !p.crashed {
		w.fail("two acquisitions are in flight: %s", name)
	}
	w.asked[name] = append(w.asked[name], now)
	return func() {
		i := slices.Index(w.asked[name], now)
		w.asked[name] = slices.Delete(w.asked[name], i, i+1)
	}
}

// checkOrphans: when all is quiet and everybody has gone, nothing is held.
func (w *world) checkOrphans() {
	for _, table := range []string{"mutex", "eidlock", "lease", "member"} {
		if !w.srv.has("coord_" + table) {
			continue
		}
		got, err := w.srv.exec(fmt.Sprintf("SELECT * FROM coord_%s WHERE expires_at > %d", table, w.now().UnixMicro()), nil)
		w.must(got, err)
		for _, row := range got.rows {
			w.fail("a row of %s belongs to nobody: %v %v", table, got.columns, row)
		}
	}
}

// checkConnections: what a process borrowed it has given back, but for calls that hang.
func (p *process) checkConnections() {
	if n := p.db.Stats().InUse; n > 0 && (p.flying == 0 || p.hanging == 0 && p.w.calm(lightly, p.w.timeout)) {
		p.w.fail("%s: %d connections are in use after Close, %d calls of the driver in flight", p.name, n, p.flying)
	}
}

// checkQuiet: at the very end nothing is left.
func (w *world) checkQuiet() {
	time.Sleep(time.Second)
	for _, p := range w.procs {
		if p.flying > 0 || len(p.conns) > 0 {
			w.fail("%s: %d calls of the driver are in flight at the end, %d connections are open", p.name, p.flying, len(p.conns))
		}
	}
}
