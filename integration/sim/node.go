package sim

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/seed-4c80c132/coord"
)

// node is a place where one process runs after another.
type node struct {
	w      *world
	id     int
	offset time.Duration // of its clock
	starts int
	p      *process // nil while none runs
}

// process is one life of a node: a pool, a Coord and its users.
type process struct {
	w       *world
	node    int
	name    string
	pool    int
	rng     *rand.Rand
	crashed bool
	closed  bool // its Coord, perhaps while users are at work
	conns   []*conn
	flying  int // calls of the driver
	hanging int // those of them that have met a fault
	failed  int // acquisitions without an answer, one after the other

	db    *sql.DB
	c     *coord.Coord
	mutex *coord.Mutex
	ids   *coord.EIDLocker

	life  context.Context // ends when the process is to stop
	end   context.CancelFunc
	users sync.WaitGroup
	runs  map[string]bool // the groups that it runs
}

func newNode(w *world, id int) *node {
	n := &node{w: w, id: id}
	n.start()
	return n
}

// start starts a process, under the former name or a new one.
func (n *node) start() {
	w, cfg := n.w, n.w.plan.nodes[n.id]
	if n.p != nil { // It was started meanwhile.
		return
	}
	n.starts++
	rng := rand.New(rand.NewPCG(w.seed, uint64(n.id)<<32|uint64(n.starts)))
	name := fmt.Sprint("n", n.id)
	if rng.IntN(2) == 0 {
		name = fmt.Sprintf("n%d.%d", n.id, n.starts)
	}
	p := &process{w: w, node: n.id, name: name, pool: cfg.pool, rng: rng, runs: map[string]bool{}}
	p.life, p.end = context.WithCancel(context.Background())
	p.db = sql.OpenDB(p)
	p.db.SetMaxOpenConns(cfg.pool)
	if rng.IntN(2) == 0 {
		p.db.SetMaxIdleConns(cfg.pool)
	}
	owner := p.name
	if w.alike {
		owner = "the same"
	}
	var err error
	p.c, err = coord.New(p.db, dialect{coord.SQLite}, coord.Config{Owner: owner, Timeout: w.timeout, NoPrepare: cfg.noPrepare,
		Clock: func() time.Time { return time.Now().Add(n.offset) }, Logger: slog.New(logger{p: p})})
	w.possible(err)
	d, err := p.c.TableDriver(coord.DriverConfig{})
	w.possible(err)
	p.mutex, err = coord.NewMutex(d, coord.MutexConfig{TTL: w.ttl})
	w.possible(err)
	p.ids, err = p.c.EIDLocker(coord.EIDConfig{TTL: w.ttl, AcquireBackoff: 20 * time.Millisecond, AcquireMaxBackoff: 500 * time.Millisecond, AcquireDeadline: 30 * time.Second})
	w.possible(err)
	w.note("%s starts, pool %d", p.name, p.pool)
	w.procs = append(w.procs, p)
	n.p = p
	p.users.Go(func() {
		if cfg.migrate {
			_ = p.c.Migrate(p.life)
		}
		for i, u := range cfg.users {
			p.users.Go(func() { newUser(p, u, i, n.starts).live() })
		}
	})
}

func (w *world) possible(err error) {
	if err != nil {
		panic(err)
	}
}

// crash is kill -9, or a power failure, after which the server keeps the connections for a while.
func (n *node) crash(power bool) {
	p := n.p
	if p == nil {
		return
	}
	n.p = nil
	n.w.note("%s crashes", p.name)
	p.crashed = true
	p.end()
	kill := func() {
		for _, c := range slices.Clone(p.conns) {
			c.end()
		}
	}
	if power {
		time.AfterFunc(p.w.timeout, kill)
	} else {
		kill()
	}
}

// leave is a stop in order: the users end, then the Coord is closed.
func (n *node) leave() {
	p := n.p
	if p == nil {
		return
	}
	n.p = nil
	p.end()
	p.users.Wait()
	p.close()
	p.checkConnections()
	n.w.closing.Go(func() { _ = p.db.Close() }) // It waits for calls that hang.
	n.w.note("%s has stopped", p.name)
}

// close closes the Coord.
func (p *process) close() {
	p.closed = true
	done := p.expect("Close", 4*p.w.timeout)
	_ = p.ids.Close()
	_ = p.c.Close()
	done()
}

// bury ends what a crashed process has left, for the sake of the test.
func (p *process) bury() {
	if p.crashed {
		p.users.Wait()
		_ = p.ids.Close()
		_ = p.c.Close()
		_ = p.db.Close()
	}
}

func (p *process) latency() time.Duration {
	return time.Duration(p.rng.Int64N(int64(2*time.Millisecond)) + 1)
}

func (p *process) forget(c *conn) {
	p.conns = slices.DeleteFunc(p.conns, func(d *conn) bool { return d == c })
}

// killConnections ends the connections, which calls in flight hear of at once, and others at their next use.
func (p *process) killConnections(f *fault) {
	for _, c := range slices.Clone(p.conns) {
		if f.kind == restart || f.rng.IntN(2) == 0 {
			close(c.killed)
			c.end()
			p.forget(c)
		}
	}
}

// expect notes that a call must end within some time, but for those of a process that has crashed.
func (p *process) expect(what string, most time.Duration) (done func()) {
	began := p.w.now()
	timer := time.AfterFunc(most+slack, func() {
		if !p.crashed {
			p.w.fail("%s: %s has not returned after %v", p.name, what, p.w.now().Sub(began))
		}
	})
	return func() { timer.Stop() }
}

// slack is what a call may take beyond its bound.
const slack = 50 * time.Millisecond

// expectAfter is expect for a call that returns when ctx has ended, and busy is false, if there is one.
func (p *process) expectAfter(ctx context.Context, what string, most time.Duration, busy ...func() bool) (done func()) {
	began, returned, over := p.w.now(), false, func() {}
	stop := context.AfterFunc(ctx, func() {
		for !returned && len(busy) > 0 && busy[0]() {
			time.Sleep(10 * time.Millisecond)
		}
		if returned {
			return
		}
		over = p.expect(fmt.Sprintf("%s, which was to end after %v,", what, p.w.now().Sub(began)), most)
	})
	return func() {
		returned = true
		stop()
		over()
	}
}
