package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/seed-4c80c132/coord"
	_ "modernc.org/sqlite"
)

const (
	ttl    = 1500 * time.Millisecond // of leases and membership: how soon a crash is noticed
	tick   = ttl / 4                 // of renewals: two may fail and nothing is lost
	margin = ttl / 4                 // before the deadline of a lease: no work begins any more
	piece  = 5 * time.Millisecond    // of work; the margin must outlast it by far
)

// workerEnv makes a process of this program a worker. It holds a workerConfig. (In
// the environment, since everyone may read command lines, and the URL of a
// database may hold a password.)
const workerEnv = "COORD_EXAMPLE_WORKER"

type workerConfig struct {
	Name       string // its owner name and node name, unique in the run
	Run        string // names the group and the service of this run
	Partitions int
	Driver     string
	DSN        string
	Record     string // the file that it appends its record to
}

// worker is one process of the service. All that it does happens on one goroutine:
// while it waits for the database it does not work, and while it works nothing
// about its leases changes.
type worker struct {
	workerConfig
	leases  *coord.LeaseStore
	members *coord.MemberStore
	record  *record
	held    map[int]*holding // by partition
}

// holding is a partition that this worker holds as far as it knows.
type holding struct {
	lease  coord.Lease
	worked time.Duration // the end of the last piece of work, by the shared clock
}

// until is when work under the lease must have stopped: [coord.Lease.Deadline] is
// counted from before the renewal was sent, by this process's monotonic clock, so
// nobody else can have the lease before it, whatever the network or the database does.
func (h *holding) until() time.Time { return h.lease.Deadline.Add(-margin) }

func workerMain(text string) int {
	signal.Ignore(os.Interrupt, syscall.SIGHUP) // the parent decides; see run
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // The parent closes the pipe, or dies, which closes it too.
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	var config workerConfig
	err := json.Unmarshal([]byte(text), &config)
	if err == nil {
		err = runWorker(ctx, config)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	return exitOK
}

// runWorker works until ctx ends, and then gives up all that it holds.
func runWorker(ctx context.Context, config workerConfig) error {
	db, c, err := open(config.Driver, config.DSN)
	if err != nil {
		return err
	}
	defer db.Close()
	defer c.Close()
	rec, err := createRecord(config.Record)
	if err != nil {
		return err
	}
	defer rec.Close()
	w := &worker{config, c.Leases(), c.Members(), rec, map[int]*holding{}}
	for ctx.Err() == nil {
		next := time.Now().Add(tick)
		// A failed tick loses nothing yet: leases are good until their deadlines.
		if err := w.tick(ctx); err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, err)
		}
		w.work(ctx, next)
	}
	return w.leave(ctx)
}

// open opens the database and a Coord on it.
func open(driver, dsn string) (*sql.DB, *coord.Coord, error) {
	dialect := coord.SQLite
	if driver == "pgx" {
		dialect = coord.Postgres
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, nil, fmt.Errorf("open the %s database: %w", dialect.Name(), err)
	}
	// An answer that takes longer than a lease lasts is of no use.
	c, err := coord.New(db, dialect, coord.Config{Prefix: "workers_", Timeout: ttl})
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return db, c, nil
}

// tick keeps what this worker has, then brings it to its fair share. Renewing comes
// first: it is what can't wait.
func (w *worker) tick(ctx context.Context) error {
	if err := w.renew(ctx); err != nil {
		return err
	}
	if _, err := w.members.Heartbeat(ctx, w.Run, w.Name, "", ttl, nil); err != nil {
		return err
	}
	members, err := w.members.List(ctx, w.Run)
	if err != nil {
		return err
	}
	share := fairShare(w.Partitions, len(members), slices.IndexFunc(members, w.isMe))
	if err := w.shed(ctx, share); err != nil {
		return err
	}
	return w.take(ctx, share)
}

func (w *worker) isMe(m coord.Member) bool { return m.Node == w.Name }

// fairShare is how many partitions the member at index takes, so that all shares
// add up to partitions and differ by at most one. Who is no member takes none.
func fairShare(partitions, members, index int) int {
	if index < 0 {
		return 0
	}
	share := partitions / members
	if index < partitions%members {
		share++
	}
	return share
}

// renew extends all leases by one statement. What is not in the answer is lost, and
// so is what is there at another epoch.
func (w *worker) renew(ctx context.Context) error {
	partitions := slices.Collect(maps.Keys(w.held))
	renewed, err := w.leases.Renew(ctx, w.Run, partitions, w.Name, ttl)
	if err != nil {
		return err
	}
	for _, p := range partitions {
		h := w.held[p]
		i := slices.IndexFunc(renewed, func(l coord.Lease) bool { return l.Partition == p && l.Epoch == h.lease.Epoch })
		if i < 0 {
			w.stop(p)
			continue
		}
		h.lease = renewed[i]
		w.record.write("extend", h.lease, shared(h.until())) // before any work under it
	}
	return nil
}

// shed releases what is more than share.
func (w *worker) shed(ctx context.Context, share int) error {
	var errs []error
	for _, p := range slices.Sorted(maps.Keys(w.held))[min(share, len(w.held)):] {
		w.stop(p) // before the release: after it another may begin
		_, err := w.leases.Release(ctx, w.Run, p, w.Name)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// take acquires free partitions until it has share of them.
func (w *worker) take(ctx context.Context, share int) error {
	if len(w.held) >= share {
		return nil
	}
	owners, err := w.leases.Owners(ctx, w.Run)
	if err != nil {
		return err
	}
	for p := range w.Partitions {
		held := slices.ContainsFunc(owners, func(l coord.Lease) bool { return l.Partition == p })
		if held || len(w.held) >= share {
			continue
		}
		lease, err := w.leases.Acquire(ctx, w.Run, p, w.Name, ttl)
		switch {
		case errors.Is(err, coord.ErrHeld): // Another was faster.
		case err != nil:
			return err
		default:
			w.start(lease)
		}
	}
	return nil
}

// start makes lease one to work under.
func (w *worker) start(lease coord.Lease) {
	h := &holding{lease: lease}
	w.held[lease.Partition] = h
	w.record.write("start", lease, shared(h.until()))
}

// stop ends the work on a partition. The claim that it puts on record ends now; or,
// if the lease had run out before, then, unless a piece of work went on for longer.
func (w *worker) stop(partition int) {
	h := w.held[partition]
	delete(w.held, partition)
	w.record.write("stop", h.lease, max(h.worked, min(sharedNow(), shared(h.until()))))
}

// work works on the partitions in turn until next.
func (w *worker) work(ctx context.Context, next time.Time) {
	for ctx.Err() == nil && time.Now().Before(next) {
		for _, h := range w.held {
			// Judged anew before each piece: a renewal may have failed, this
			// process may have been stopped.
			if time.Now().Before(h.until()) {
				time.Sleep(piece) // stands for real work
				h.worked = sharedNow()
			}
		}
		pause(ctx, piece)
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// leave gives everything up, so that others need not wait for it to expire. ctx has
// ended; releases run all the same.
func (w *worker) leave(ctx context.Context) error {
	return errors.Join(w.shed(ctx, 0), w.members.Leave(ctx, w.Run, w.Name))
}
