package integration

import (
	"bufio"
	"bytes"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/seed-4c80c132/coord"
)

// Tests that need several processes start their own binary again in a role, and
// talk to it over its standard input and output.
const roleVariable = "COORD_TEST_ROLE"

// orders is what a process is told: which database, and what to do there.
type orders struct {
	Engine string
	URL    string
	Mode   string // "table" or "advisory"
	Count  int
	Random bool // release, expire and purge at random
	Node   string
	TTL    time.Duration
	Prover proverOrders
}

// roles are what a process of a test can be, by name.
var roles = map[string]func(orders, *sql.DB, *coord.Coord) error{
	"counter":  countUp,
	"transfer": transfer,
	"runner":   runShare,
	"prover":   prove,
}

// play is main of a process in a role.
func play(role string) int {
	var o orders
	err := json.NewDecoder(os.Stdin).Decode(&o)
	for _, e := range engines {
		if err == nil && e.name == o.Engine {
			err = playOn(e, role, o)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func playOn(e engine, role string, o orders) error {
	db, err := sql.Open(e.driver, o.URL)
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxIdleConns(16)
	c, err := coord.New(db, e.dialect, (&env{engine: e}).config())
	if err != nil {
		return err
	}
	defer c.Close()
	return roles[role](o, db, c)
}

// process is one that runs in a role.
type process struct {
	cmd    *exec.Cmd
	lines  *bufio.Scanner
	stdin  io.WriteCloser
	errors bytes.Buffer
}

// start starts a process in a role. It is killed with the test.
func (e *env) start(t *testing.T, role string, o orders) *process {
	t.Helper()
	o.Engine, o.URL = e.name, e.url
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role)
	p.cmd.Stderr = &p.errors
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cmd.Process.Kill(); p.cmd.Wait() })
	p.lines = bufio.NewScanner(stdout)
	if _, err := p.stdin.Write(append(text, '\n')); err != nil {
		t.Fatal(err)
	}
	return p
}

// wait reads the process's lines to their end and reports how it ended.
func (p *process) wait(t *testing.T, line func(string)) {
	t.Helper()
	for p.lines.Scan() {
		line(p.lines.Text())
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("process: %v\n%s", err, p.errors.Bytes())
	}
}
