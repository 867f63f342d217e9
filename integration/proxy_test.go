package integration

import (
	"errors"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// proxy stands between a driver and the server, and can turn into a black hole: it
// then forwards nothing any more, in one direction or both, and tells nobody, like a
// network that drops packets.
type proxy struct {
	listener net.Listener
	mu       sync.Mutex
	target   string
	closed   bool
	conns    map[net.Conn]bool // of both sides
	drop     [2]atomic.Bool    // what clients send, what the server sends
	delay    atomic.Int64      // of what the server sends
	asked    atomic.Bool       // the client spoke last
	trips    atomic.Int64      // how often it has, after the server
	wg       sync.WaitGroup
}

// The directions of a proxy.
const toServer, toClient = 0, 1

// newProxy returns a proxy in front of the environment's server, and the URL that
// leads through it.
func newProxy(t testing.TB, e *env) (*proxy, string) {
	t.Helper()
	u, err := url.Parse(e.url)
	if err != nil {
		t.Fatal(err)
	}
	p := proxyTo(t, u.Host)
	u.Host = p.addr()
	return p, u.String()
}

// proxyTo returns a proxy in front of an address.
func proxyTo(t testing.TB, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: target, conns: map[net.Conn]bool{}}
	p.wg.Go(p.serve)
	t.Cleanup(p.close)
	return p
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

// swallow turns the proxy into a black hole, in both directions unless some are
// named.
func (p *proxy) swallow(directions ...int) {
	if len(directions) == 0 {
		directions = []int{toServer, toClient}
	}
	for _, d := range directions {
		p.drop[d].Store(true)
	}
}

// heal lets everything pass again, but on new connections: a stream can't go on
// without what was dropped.
func (p *proxy) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut()
	for d := range p.drop {
		p.drop[d].Store(false)
	}
}

// redirect leads new connections to another address, and ends those there are.
func (p *proxy) redirect(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
	p.cut()
}

// cut ends every connection. Its caller has the mutex.
func (p *proxy) cut() {
	for c := range p.conns {
		c.Close()
	}
}

// close ends the proxy.
func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	p.cut()
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		target := p.target
		p.mu.Unlock()
		server, err := net.Dial("tcp", target)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		p.conns[client], p.conns[server] = true, true
		if p.closed {
			p.cut()
		}
		p.mu.Unlock()
		p.wg.Go(func() { p.forward(client, server, toServer) })
		p.wg.Go(func() { p.forward(server, client, toClient) })
	}
}

// forward copies until either side ends. In a black hole it reads on, so that the
// sender's kernel is content, and drops what it reads.
func (p *proxy) forward(from, to net.Conn, direction int) {
	buffer := make([]byte, 32<<10)
	asks := direction == toServer
	for {
		n, err := from.Read(buffer)
		if n > 0 && p.asked.Swap(asks) != asks && asks {
			p.trips.Add(1)
		}
		if p.drop[direction].Load() {
			if err != nil {
				return // That the connection has ended is dropped too.
			}
			continue
		}
		if err == nil {
			if !asks {
				time.Sleep(time.Duration(p.delay.Load()))
			}
			_, err = to.Write(buffer[:n])
		}
		if err != nil {
			p.forget(from, to)
			return
		}
	}
}

func (p *proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}

// TestRoundTrips counts them on the wire, once statements are prepared.
func TestRoundTrips(t *testing.T) {
	eachPostgres(t, func(t *testing.T, e *env) {
		p, through := newProxy(t, e)
		behind := *e
		behind.url = through
		db := behind.open(t)
		db.SetMaxOpenConns(2) // One is pinned, so that the pool has one to prepare on.
		c := newCoord(t, db, e.dialect, e.config())
		table, err := c.TableDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		advisory, err := newCoord(t, behind.open(t), e.dialect, e.config()).AdvisoryDriver(coord.DriverConfig{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, version := t.Context(), int64(0)
		lock := func(m *coord.Mutex) error {
			l, err := m.TryLock(ctx, "m")
			if err != nil {
				return err
			}
			return l.Unlock(ctx)
		}
		tables, sessions := newMutex(t, table, coord.MutexConfig{}), newMutex(t, advisory, coord.MutexConfig{})
		ids, err := c.EIDLocker(coord.EIDConfig{})
		if err != nil {
			t.Fatal(err)
		}
		scope, owner := coord.ReservationScope{Context: "app", Aggregate: "user"}, coord.AggregateRef{ID: "o"}
		for _, op := range []struct {
			name  string
			trips int64
			do    func() error
		}{
			{"acquire lease", 1, func() error { _, err := c.Leases().Acquire(ctx, "g", 0, "o", time.Hour); return err }},
			{"renew 3 leases", 1, func() error { _, err := c.Leases().Renew(ctx, "g", []int{0, 1, 2}, "o", time.Hour); return err }},
			{"release lease", 1, func() error { _, err := c.Leases().Release(ctx, "g", 0, "o"); return err }},
			{"heartbeat", 1, func() error { _, err := c.Members().Heartbeat(ctx, "s", "n", "", time.Hour, nil); return err }},
			{"list", 1, func() error { _, err := c.Members().List(ctx, "s"); return err }},
			{"lock and unlock, table", 2, func() error { return lock(tables) }},
			{"lock and unlock, advisory", 2, func() error { return lock(sessions) }},
			{"lock and release 3 ids", 2, func() error {
				err := ids.AcquireLocks(ctx, "tx", "a", "b", "c")
				ids.ReleaseLocks(ctx, "tx")
				return err
			}},
			{"lock 3 ids, renew 2, drop one and release", 4, func() error {
				err := errors.Join(ids.AcquireLocks(ctx, "tx", "a", "b", "c"), ids.AcquireLocks(ctx, "tx", "a", "b"))
				ids.ReleaseLocks(ctx, "tx")
				return err
			}},
			{"reserve and confirm", 2, func() error {
				version++
				_, err := c.Reservations().Reserve(ctx, scope, "k", owner, "h", time.Hour)
				if err == nil {
					_, err = c.Reservations().Confirm(ctx, scope, "k", owner, version)
				}
				return err
			}},
		} {
			for range 3 { // First uses.
				if err := op.do(); err != nil {
					t.Fatalf("%s: %v", op.name, err)
				}
			}
			before := p.trips.Load()
			if err := op.do(); err != nil {
				t.Fatalf("%s: %v", op.name, err)
			}
			if trips := p.trips.Load() - before; trips != op.trips {
				t.Errorf("%s: %d round trips, want %d", op.name, trips, op.trips)
			}
		}
	})
}
