package integration

import (
	"net"
	"net/url"
	"sync"
	"testing"
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
		p.wg.Go(func() { p.forward(client, server) })
		p.wg.Go(func() { p.forward(server, client) })
	}
}

// forward copies until either side ends. In a black hole it reads on, so that the
// sender's kernel is content, and drops what it reads.
func (p *proxy) forward(from, to net.Conn) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
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
