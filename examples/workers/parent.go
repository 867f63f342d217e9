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
	"slices"
	"strings"
	"time"

	"github.com/seed-4c80c132/coord"
)

const (
	look     = 100 * time.Millisecond // between looks at who holds what
	patience = 7 * time.Second        // beyond -for, on a machine that is slow
	farewell = 3 * time.Second        // for a worker to release and leave
)

// parent starts, watches and ends the workers of one run.
type parent struct {
	options
	driver, dsn string
	run         string // names the run in the database
	dir         string // holds the records, and the SQLite file
	view        *view
	leases      *coord.LeaseStore
	workers     []*process
	history     history
}

// process is a worker as the parent sees it.
type process struct {
	name   string
	record string
	cmd    *exec.Cmd
	stdin  io.Closer     // ends the worker when it is closed
	done   chan struct{} // closed once the process has ended
	err    error         // how it ended; to be read after done
	killed bool
}

// perform carries out one run and returns what the workers did. No process and no
// file is left when it returns.
func perform(ctx context.Context, opts options, v *view) (_ history, err error) {
	dir, err := os.MkdirTemp("", "coord-workers-")
	if err != nil {
		return history{}, fmt.Errorf("make a temporary directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p := &parent{options: opts, dir: dir, view: v, run: "run-" + strings.ToLower(rand.Text())}
	p.driver, p.dsn = opts.source(dir)
	db, c, err := open(p.driver, p.dsn)
	if err != nil {
		return history{}, err
	}
	defer db.Close()
	defer c.Close()
	p.leases = c.Leases()
	if _, err := p.leases.Owners(ctx, p.run); err != nil { // makes the tables, or says what is wrong
		return history{}, err
	}
	err = p.play(ctx)
	if ctx.Err() != nil {
		err = nil // interrupted: what fails then is no news
	}
	if err := errors.Join(err, p.stop()); err != nil {
		return history{}, err
	}
	return p.history, p.readRecords()
}

// source returns the driver and the data source name.
func (o options) source(dir string) (driver, dsn string) {
	if o.db != "" {
		return "pgx", o.db
	}
	return "sqlite", filepath.Join(dir, "coord.db") + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)"
}

// play is the run: start, watch, kill one, watch, and return when all is settled.
func (p *parent) play(ctx context.Context) error {
	p.history.Begin, p.history.Partitions = sharedNow(), p.partitions
	if err := p.start(); err != nil {
		return err
	}
	for begin := time.Now(); ; pause(ctx, look) {
		if err := errors.Join(ctx.Err(), p.missing()); err != nil {
			return err
		}
		leases, err := p.leases.Owners(ctx, p.run)
		if err != nil {
			return err
		}
		p.view.show(p.workers, p.partitions, leases)
		now, settled := time.Since(begin), p.settled(leases)
		switch {
		case settled && p.history.Killed == "" && now >= p.length*2/5:
			if err := p.kill(p.busiest(leases), leases); err != nil {
				return err
			}
		case settled && p.history.Killed != "" && now >= p.length, now >= p.length+patience:
			p.history.End = sharedNow()
			return nil
		}
	}
}

// start starts all workers.
func (p *parent) start() error {
	p.view.event("%d workers share %d partitions on %s", p.options.workers, p.partitions, p.database())
	for i := range p.options.workers {
		w, err := p.startWorker(fmt.Sprintf("w%d", i+1))
		if err != nil {
			return err
		}
		p.workers = append(p.workers, w)
		p.view.event("started %s (pid %d)", w.name, w.cmd.Process.Pid)
	}
	return nil
}

// startWorker starts this program again as a worker.
func (p *parent) startWorker(name string) (*process, error) {
	w := &process{name: name, record: filepath.Join(p.dir, name+".record"), done: make(chan struct{})}
	config, err := json.Marshal(workerConfig{name, p.run, p.partitions, p.driver, p.dsn, w.record})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	w.cmd = exec.Command(program)
	w.cmd.Env = append(os.Environ(), workerEnv+"="+string(config))
	w.cmd.Stderr = messages{p.view, name}
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() { w.err = w.cmd.Wait(); close(w.done) }()
	return w, nil
}

// messages shows what a worker says on its standard error.
type messages struct {
	view *view
	name string
}

func (m messages) Write(text []byte) (int, error) {
	for line := range strings.Lines(string(text)) {
		m.view.event("%s: %s", m.name, strings.TrimSpace(line))
	}
	return len(text), nil
}

// missing returns an error if a worker has ended that was not killed.
func (p *parent) missing() error {
	for _, w := range p.workers {
		select {
		case <-w.done:
			if !w.killed {
				return fmt.Errorf("%s ended before it was told to: %v", w.name, w.cmd.ProcessState)
			}
		default:
		}
	}
	return nil
}

// settled reports whether the live workers hold all partitions, in fair shares.
func (p *parent) settled(leases []coord.Lease) bool {
	least, most, all := p.partitions, 0, 0
	for _, w := range p.workers {
		if !w.killed {
			n := len(heldBy(w.name, leases))
			least, most, all = min(least, n), max(most, n), all+n
		}
	}
	return all == p.partitions && most-least <= 1
}

func heldBy(owner string, leases []coord.Lease) []coord.Lease {
	return slices.DeleteFunc(slices.Clone(leases), func(l coord.Lease) bool { return l.Owner != owner })
}

// busiest is the worker that holds the most; of several, one in the middle.
func (p *parent) busiest(leases []coord.Lease) *process {
	var busiest []*process
	most := 0
	for _, w := range p.workers {
		switch n := len(heldBy(w.name, leases)); {
		case n > most:
			busiest, most = []*process{w}, n
		case n == most:
			busiest = append(busiest, w)
		}
	}
	return busiest[len(busiest)/2]
}

// kill ends a worker in a way that it can't do anything about.
func (p *parent) kill(w *process, leases []coord.Lease) error {
	p.history.Killed, p.history.KilledAt, w.killed = w.name, sharedNow(), true
	if err := w.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill %s: %w", w.name, err)
	}
	<-w.done
	p.view.event("killed %s (pid %d) with SIGKILL; its partitions: %s", w.name, w.cmd.Process.Pid, numbers(heldBy(w.name, leases)))
	return nil
}

func numbers(leases []coord.Lease) string {
	var list []string
	for _, l := range leases {
		list = append(list, fmt.Sprint(l.Partition))
	}
	return strings.Join(list, ", ")
}

// stop ends all workers and waits for them: gracefully, or else by force.
func (p *parent) stop() error {
	for _, w := range p.workers {
		w.stdin.Close()
	}
	limit := time.After(farewell)
	var errs []error
	for _, w := range p.workers {
		select {
		case <-w.done:
		case <-limit:
			limit = time.After(0) // none of the others has more time
			_ = w.cmd.Process.Kill()
			<-w.done
		}
		if w.err != nil && !w.killed {
			errs = append(errs, fmt.Errorf("%s did not end well: %w", w.name, w.err))
		}
	}
	return errors.Join(errs...)
}

// readRecords puts what the workers recorded into the history.
func (p *parent) readRecords() error {
	for _, w := range p.workers {
		claims, err := readRecord(w.name, w.record)
		if err != nil {
			return err
		}
		p.history.Claims = append(p.history.Claims, claims...)
	}
	return nil
}
