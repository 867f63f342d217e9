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
// then forwards nothing any more and tells nobody, like a network that drops
// packets.
type proxy struct {
	listener net.Listener
	target   string
	mu       sync.Mutex
	conns    []net.Conn
	hole     chan struct{} // closed: nothing passes
	asked    atomic.Bool   // the client spoke last
	trips    atomic.Int64  // how often it has, after the server
	wg       sync.WaitGroup
}

// newProxy returns a proxy in front of the environment's server, and the URL that
// leads through it.
func newProxy(t *testing.T, e *env) (*proxy, string) {
	t.Helper()
	u, err := url.Parse(e.url)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: u.Host, hole: make(chan struct{})}
	u.Host = l.Addr().String()
	p.wg.Go(p.serve)
	t.Cleanup(p.close)
	return p, u.String()
}

// swallow turns the proxy into a black hole.
func (p *proxy) swallow() { close(p.hole) }

// close ends every connection.
func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		p.wg.Go(func() { p.forward(client, server, true) })
		p.wg.Go(func() { p.forward(server, client, false) })
	}
}

// forward copies until either side ends. In a black hole it reads on, so that the
// sender's kernel is content, and drops what it reads.
func (p *proxy) forward(from, to net.Conn, asks bool) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && p.asked.Swap(asks) != asks && asks {
			p.trips.Add(1)
		}
		select {
		case <-p.hole:
			if err != nil {
				return
			}
			continue
		default:
		}
		if err == nil {
			_, err = to.Write(buffer[:n])
		}
		if err != nil {
			from.Close()
			to.Close()
			return
		}
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
