//go:build unix

package testdb

import (
	"net"
	"os"
	"sync"
	"testing"
)

// runAlone is supervisor on a cluster that is there, and stays there.
const runAlone = `
dir=$1 bin=$2; shift 2
trap '' PIPE
"$bin/postgres" -D "$dir/data" "$@" 3<&- &
server=$!
{ read -r _; while kill -QUIT $server; do sleep 0.1; done; } <&3 >/dev/null 2>&1 &
watch=$!
wait $server
kill $watch 2>/dev/null
`

// initdb makes the cluster.
const initdb = `
"$2/initdb" --pgdata="$1/data" --username=postgres --pwfile="$1/password" \
	--auth=scram-sha-256 --encoding=UTF8 --locale=C --no-sync >/dev/null 3<&-
`

// Private is a server of the test's own, which it may crash.
type Private struct {
	c    *cluster
	addr *net.TCPAddr
	now  *launched
}

// NewPrivate starts a server with the programs of this machine, and skips the test if
// there are none. It ends with tb.
func NewPrivate(tb testing.TB) *Private {
	tb.Helper()
	bin, err := programs(tb.Context())
	if err != nil {
		tb.Skipf("testdb: %v", err)
	}
	p := &Private{}
	if p.addr, err = freeAddr(); err != nil {
		tb.Fatal(err)
	}
	if p.c, err = newCluster(bin); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(p.c.dir); err != nil {
			tb.Error(err)
		}
	})
	made, err := p.c.launch(initdb, p.addr)
	if err != nil {
		tb.Fatal(err)
	}
	<-made.exited
	made.pipe.Close()
	p.Start(tb)
	tb.Cleanup(func() { p.Crash(tb) })
	return p
}

// URL is that of the server's maintenance database.
func (p *Private) URL() string { return adminURL(p.addr.String(), p.c.password).String() }

// Start starts the server after Crash, and returns when it answers.
func (p *Private) Start(tb testing.TB) {
	tb.Helper()
	var err error
	if p.now, err = p.c.launch(runAlone, p.addr); err != nil {
		tb.Fatal(err)
	}
	now := p.now
	srv := &server{
		admin: adminURL(p.addr.String(), p.c.password), exited: now.exited, log: now.log,
		stop: sync.OnceValue(now.stop),
	}
	if _, err := srv.ready(tb.Context(), startTimeout); err != nil {
		_ = srv.stop()
		tb.Fatalf("testdb: start a private server: %v", err)
	}
}

// Crash ends the server at once, as pg_ctl stop -m immediate does.
func (p *Private) Crash(tb testing.TB) {
	tb.Helper()
	if err := p.now.stop(); err != nil {
		tb.Error(err)
	}
}
