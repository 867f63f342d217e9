package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/seed-4c80c132/coord"
)

const (
	look     = 50 * time.Millisecond // between looks at the table
	term     = time.Second           // how long a leader leads until something happens to it
	patience = 10 * time.Second      // for a leader to be there, on a machine that is slow
)

// parent starts, watches and ends the nodes of one run.
type parent struct {
	options
	*database
	dsn   string
	run   string // names the run in the database
	say   func(format string, args ...any)
	nodes map[string]*process
}

// process is a node as the parent sees it.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer // ends the node when it is closed
}

// row is a write of a leader.
type row struct {
	node  string
	epoch int64
}

// perform carries out one run and returns what was wrong. No process and no file is
// left when it returns.
func perform(ctx context.Context, opts options, say func(string, ...any)) (wrong []string, err error) {
	dir, err := os.MkdirTemp("", "coord-leader-")
	if err != nil {
		return nil, fmt.Errorf("make a temporary directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	driver, dsn := "pgx", opts.db
	if dsn == "" {
		driver, dsn = "sqlite", filepath.Join(dir, "coord.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_txlock=immediate"
	}
	d, err := open(driver, dsn, "parent")
	if err != nil {
		return nil, err
	}
	defer d.close()
	p := &parent{options: opts, database: d, dsn: dsn, run: "run-" + strings.ToLower(rand.Text()), say: say, nodes: map[string]*process{}}
	if _, err := d.ExecContext(ctx, "CREATE TABLE IF NOT EXISTS leader_write (run text, n bigint, node text, epoch bigint, PRIMARY KEY (run, n))"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.end()) }()
	if err := errors.Join(d.c.Migrate(ctx), p.start()); err != nil {
		return nil, err
	}
	return p.play(ctx)
}

// start starts all nodes.
func (p *parent) start() error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("start the nodes: %w", err)
	}
	for i := range p.options.nodes {
		name := fmt.Sprintf("n%d", i+1)
		config, err := json.Marshal(nodeConfig{name, p.run, p.driver, p.dsn})
		if err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		n := &process{cmd: exec.Command(program)}
		n.cmd.Env = append(os.Environ(), nodeEnv+"="+string(config))
		n.cmd.Stderr = os.Stderr
		if n.stdin, err = n.cmd.StdinPipe(); err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		if err := n.cmd.Start(); err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		p.nodes[name] = n
		p.say("started %s (pid %d)", name, n.cmd.Process.Pid)
	}
	return nil
}

// play is the run: a leader is killed, the next one resigns, and a third one leads.
func (p *parent) play(ctx context.Context) (wrong []string, err error) {
	first, err := p.leader(ctx, row{})
	if err != nil {
		return nil, err
	}
	killed := time.Now()
	if err := p.kill(first.node); err != nil {
		return nil, err
	}
	p.say("killed %s with SIGKILL", first.node)
	second, err := p.leader(ctx, first)
	if err != nil {
		return nil, err
	}
	p.say("that was %.1f s after the kill, at most", time.Since(killed).Seconds()-term.Seconds())
	if wrong := p.writeLate(ctx, first); wrong != "" {
		return []string{wrong}, nil
	}
	if len(p.nodes) > 1 {
		p.say("%s is told to end, and resigns", second.node)
		if err := p.stop(second.node); err != nil {
			return nil, err
		}
		if _, err := p.leader(ctx, second); err != nil {
			return nil, err
		}
	}
	if err := p.end(); err != nil {
		return nil, err
	}
	rows, err := p.rows(ctx)
	return check(rows), err
}

// leader waits until there is one after another, and then a term.
func (p *parent) leader(ctx context.Context, after row) (row, error) {
	for begin := time.Now(); ; pause(ctx, look) {
		rows, err := p.rows(ctx)
		switch {
		case err != nil:
			return row{}, err
		case len(rows) > 0 && rows[len(rows)-1].epoch > after.epoch:
			now := rows[len(rows)-1]
			p.say("%s leads at epoch %d", now.node, now.epoch)
			pause(ctx, term)
			return now, ctx.Err()
		case time.Since(begin) > patience:
			return row{}, fmt.Errorf("no leader within %s", patience)
		}
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// writeLate writes in the name of a leader that was, as if a message of its had been
// on its way for long.
func (p *parent) writeLate(ctx context.Context, by row) (wrong string) {
	lease := coord.Lease{Group: p.run, Partition: 0, Owner: by.node, Epoch: by.epoch}
	if err := p.write(ctx, p.run, lease); !errors.Is(err, coord.ErrLost) {
		return fmt.Sprintf("a late write in the name of %s at epoch %d was not refused: %v", by.node, by.epoch, err)
	}
	p.say("a late write in the name of %s at epoch %d is refused", by.node, by.epoch)
	return ""
}

// rows are all writes of the run, in order.
func (p *parent) rows(ctx context.Context) (all []row, err error) {
	rows, err := p.QueryContext(ctx, p.text("SELECT node, epoch FROM leader_write WHERE run = $1 ORDER BY n"), p.run)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var r row
		if err := rows.Scan(&r.node, &r.epoch); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, rows.Err()
}

// check returns what is wrong with the writes, in words.
func check(rows []row) (wrong []string) {
	leaders := map[int64]string{}
	for i, r := range rows {
		if i > 0 && r.epoch < rows[i-1].epoch {
			wrong = append(wrong, fmt.Sprintf("%s wrote at epoch %d after %s had at epoch %d", r.node, r.epoch, rows[i-1].node, rows[i-1].epoch))
		}
		if known := leaders[r.epoch]; known != "" && known != r.node {
			wrong = append(wrong, fmt.Sprintf("%s and %s both wrote at epoch %d", known, r.node, r.epoch))
		}
		leaders[r.epoch] = r.node
	}
	if len(leaders) < 2 {
		wrong = append(wrong, fmt.Sprintf("%d leaders, so no takeover was seen", len(leaders)))
	}
	return wrong
}

// kill ends a node in a way that it can't do anything about.
func (p *parent) kill(name string) error {
	n := p.nodes[name]
	delete(p.nodes, name)
	if err := n.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill %s: %w", name, err)
	}
	_ = n.cmd.Wait() // it was killed
	return nil
}

// stop ends a node in order.
func (p *parent) stop(name string) error {
	n := p.nodes[name]
	delete(p.nodes, name)
	n.stdin.Close()
	limit := time.AfterFunc(patience, func() { _ = n.cmd.Process.Kill() })
	defer limit.Stop()
	if err := n.cmd.Wait(); err != nil {
		return fmt.Errorf("%s did not end well: %w", name, err)
	}
	return nil
}

// end ends all nodes that are left.
func (p *parent) end() error {
	var errs []error
	for _, n := range p.nodes {
		n.stdin.Close() // All at once; stop then waits for each.
	}
	for name := range p.nodes {
		errs = append(errs, p.stop(name))
	}
	return errors.Join(errs...)
}
