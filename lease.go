package coord

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

// Lease is one partition of a group, held by an owner until it expires.
type Lease struct {
	Group     string
	Partition int
	Owner     string
	// Epoch is the fencing token. Every acquisition of a partition has a larger
	// one than all before it.
	Epoch int64
	// ExpiresAt is the expiry by the clock that judges it, see [Config.Clock].
	ExpiresAt time.Time
	// Deadline is how long the owner may trust the lease by its own monotonic
	// clock: the moment before the statement was sent, plus the TTL. Subtract a
	// margin for the work that must be over by then. It is zero in what Owners
	// returns.
	Deadline time.Time
}

// LeaseStore leases the partitions of groups to owners. Its methods are safe for
// concurrent use; they run one at a time on a connection that is borrowed from the
// pool once and kept until [Coord.Close]; if the pool is limited to one, it is given
// back after each. Nothing renews a lease but the caller, every TTL/3 or so, or
// [Coord.RunPartitions] what it has acquired itself. They give up when ctx ends before
// they are sent; once sent they wait for the database, no longer than
// [Config.Timeout]. An Acquire that waits for an open Guard holds the others up for as
// long: a TTL had better be four times the Timeout or more.
type LeaseStore struct {
	c     *Coord
	table *table

	acquire string // (group, partition, owner, ttl, now, attempt, wait) row of (granted, owner, epoch, expires), or none
	holder  string // (group, partition, now) row of (owner, expires), or none
	undo    string // (group, partition, owner, attempt) changes the row of that attempt
	renew   string // (group, partitions json, owner, ttl, now) rows of (partition, epoch, expires)
	release string // (group, partition, owner, epoch) changes the row once
	owners  string // (group, now) rows of (partition, owner, epoch, expires)
	guard   string // (group, partition, owner, epoch, now) row, or none
}

func (s *LeaseStore) load(c *Coord) error {
	ddl, ok, err := load(c.dialect, c.names, "lease.sql",
		section{"acquire", &s.acquire}, section{"holder", &s.holder}, section{"undo", &s.undo}, section{"renew", &s.renew},
		section{"release", &s.release}, section{"owners", &s.owners}, section{"guard", &s.guard})
	s.c = c
	if ok {
		s.table, err = c.newTable(c.names, "coord_lease", ddl, "", "", s.guard)
	}
	return err
}

// Acquire takes the lease for ttl if it is free, expired, or already owner's; each
// time its epoch grows by one, so that a restarted process fences off its former
// self. It returns an [ErrHeld], as a [*HeldError], if another owner has it; it may
// wait for an open Guard of the former owner.
//
// If the reply is lost the caller gets the driver's error, and what may have been
// granted is released in the background.
//
// The context bounds the acquisition only.
func (s *LeaseStore) Acquire(ctx context.Context, group string, partition int, owner string, ttl time.Duration) (Lease, error) {
	return s.take(ctx, group, partition, owner, ttl, true)
}

// take is Acquire, which need not wait for anybody's transaction. That it must not is
// an [ErrHeld] too.
func (s *LeaseStore) take(ctx context.Context, group string, partition int, owner string, ttl time.Duration, wait bool) (Lease, error) {
	if err := first(checkLease(group, partition, owner), checkTTL(ttl)); err != nil {
		return Lease{}, wrap("acquire lease", err)
	}
	want := Lease{Group: group, Partition: partition, Owner: owner}
	what := leaseName(group, partition)
	attempt := s.c.attempt()
	got, err := onTable(ctx, s.c, s.table, func(ctx context.Context, conn *pinned) (acquired, error) {
		return s.tryAcquire(ctx, conn, want, ttl, attempt, wait)
	}, func() { s.free(want, attempt) })
	if err == nil && got.held != nil {
		return Lease{}, got.held
	}
	return got.lease, wrap("acquire "+what, err)
}

// free releases in the background what an attempt may have been granted.
func (s *LeaseStore) free(lease Lease, attempt int64) {
	s.c.undo(leaseName(lease.Group, lease.Partition), nil, func(ctx context.Context) (bool, error) {
		n, err := onSession(ctx, s.c.session, func(ctx context.Context, conn *pinned) (int64, error) {
			return conn.exec(ctx, s.undo, lease.Group, lease.Partition, lease.Owner, attempt)
		})
		return n > 0, err
	})
}

// acquired is how an acquisition that got its answer ended.
type acquired struct {
	lease Lease
	held  *HeldError // nil if the lease was granted
}

// tryAcquire sends the acquisition. On engines that can't name the holder in the
// same statement, and when a rival was faster, it reads who it is.
func (s *LeaseStore) tryAcquire(ctx context.Context, conn *pinned, lease Lease, ttl time.Duration, attempt int64, wait bool) (acquired, error) {
	var granted bool
	var holder string
	var epoch, expires int64
	sent := time.Now()
	rows, err := conn.query(ctx, s.acquire, lease.Group, lease.Partition, lease.Owner, micros(ttl), s.c.now(), attempt, wait)
	err = scanRows(rows, err, func() error { return rows.Scan(&granted, &holder, &epoch, &expires) })
	if err == nil && holder == "" {
		rows, err = conn.query(ctx, s.holder, lease.Group, lease.Partition, s.c.now())
		err = scanRows(rows, err, func() error { return rows.Scan(&holder, &expires) })
	}
	switch {
	case err != nil:
		return acquired{}, err
	case granted:
		lease.Epoch, lease.ExpiresAt, lease.Deadline = epoch, time.UnixMicro(expires), sent.Add(ttl)
		return acquired{lease: lease}, nil
	}
	held := &HeldError{What: leaseName(lease.Group, lease.Partition), Owner: holder}
	if holder != "" {
		held.ExpiresAt = time.UnixMicro(expires)
	}
	return acquired{held: held}, nil
}

// Renew extends those of the partitions that are still owner's and have not
// expired to ttl from now, by one statement, and returns them, ordered by
// partition, their epochs unchanged. A partition that is missing from the result
// is lost. The caller compares epochs: a second process under the same owner name
// may have taken a partition over. With no partitions nothing is sent.
func (s *LeaseStore) Renew(ctx context.Context, group string, partitions []int, owner string, ttl time.Duration) ([]Lease, error) {
	partitions = slices.Compact(slices.Sorted(slices.Values(partitions)))
	lowest := 0
	if len(partitions) > 0 {
		lowest = partitions[0]
	}
	if err := first(checkLease(group, lowest, owner), checkTTL(ttl)); err != nil || len(partitions) == 0 {
		return nil, wrap("renew leases", err)
	}
	list := jsonList(partitions)
	leases, err := onTable(ctx, s.c, s.table, func(ctx context.Context, conn *pinned) ([]Lease, error) {
		return s.sendRenew(ctx, conn, make([]Lease, 0, len(partitions)), group, list, owner, ttl)
	}, nil)
	return leases, wrap("renew leases "+group, err)
}

// sendRenew appends what is still owner's to leases.
func (s *LeaseStore) sendRenew(ctx context.Context, conn *pinned, leases []Lease, group, partitions, owner string, ttl time.Duration) ([]Lease, error) {
	var partition, epoch, expires int64 // int64, since database/sql reads an int by way of its text
	sent := time.Now()
	rows, err := conn.query(ctx, s.renew, group, partitions, owner, micros(ttl), s.c.now())
	err = scanRows(rows, err, func() error {
		err := rows.Scan(&partition, &epoch, &expires)
		leases = append(leases, Lease{group, int(partition), owner, epoch, time.UnixMicro(expires), sent.Add(ttl)})
		return err
	})
	slices.SortFunc(leases, func(a, b Lease) int { return cmp.Compare(a.Partition, b.Partition) })
	return leases, err
}

// Release gives the lease up and keeps its row, so that the epoch continues. It goes
// by owner, not by epoch: a former process of that name ends its successor's lease.
// It returns true the first time the owner releases it, even after it expired as long
// as nobody has taken it, and false otherwise. It runs even if ctx has ended.
func (s *LeaseStore) Release(ctx context.Context, group string, partition int, owner string) (bool, error) {
	return s.giveUp(ctx, group, partition, owner, 0)
}

// giveUp is Release of one epoch, or of any if it is 0.
func (s *LeaseStore) giveUp(ctx context.Context, group string, partition int, owner string, epoch int64) (bool, error) {
	if err := checkLease(group, partition, owner); err != nil {
		return false, wrap("release lease", err)
	}
	ctx, cancel := s.c.detach(ctx)
	defer cancel()
	changed, err := onTable(ctx, s.c, s.table, func(ctx context.Context, conn *pinned) (int64, error) {
		return conn.exec(ctx, s.release, group, partition, owner, epoch)
	}, nil)
	return changed > 0, wrap("release "+leaseName(group, partition), err)
}

// Owners returns the leases of a group that have not expired, ordered by
// partition.
func (s *LeaseStore) Owners(ctx context.Context, group string) ([]Lease, error) {
	if err := checkText("group", group); err != nil {
		return nil, wrap("owners of leases", err)
	}
	leases, err := onTable(ctx, s.c, s.table, func(ctx context.Context, conn *pinned) ([]Lease, error) {
		var leases []Lease
		var owner string
		var partition, epoch, expires int64
		rows, err := conn.query(ctx, s.owners, group, s.c.now())
		err = scanRows(rows, err, func() error {
			err := rows.Scan(&partition, &owner, &epoch, &expires)
			leases = append(leases, Lease{Group: group, Partition: int(partition), Owner: owner, Epoch: epoch, ExpiresAt: time.UnixMicro(expires)})
			return err
		})
		return leases, err
	}, nil)
	return leases, wrap("owners of leases "+group, err)
}

// Guard checks inside the caller's transaction that lease is still held by its
// owner at its epoch, and keeps it so until tx ends: a takeover waits for it, while
// renewals and releases do not (on SQLite every write does). It returns [ErrLost]
// if the lease is not held, and the caller must then roll back.
//
// Call it first in the transaction, and not under a savepoint, whose rollback ends
// it. Under REPEATABLE READ and above it judges the transaction's snapshot, and a
// serialization failure (40001) means: run the transaction again. Outside a
// transaction it would protect nothing: see [DBTX].
func (s *LeaseStore) Guard(ctx context.Context, tx DBTX, lease Lease) error {
	if err := first(checkTx(tx), checkLease(lease.Group, lease.Partition, lease.Owner)); err != nil {
		return wrap("guard lease", err)
	}
	err := s.c.guard(ctx, tx, s.table, s.guard, lease.Group, lease.Partition, lease.Owner, lease.Epoch, s.c.now())
	return wrap("guard "+leaseName(lease.Group, lease.Partition), err)
}

func checkLease(group string, partition int, owner string) error {
	if partition < 0 {
		return invalid("partition %d is negative", partition)
	}
	return first(checkText("group", group), checkText("owner", owner))
}

func leaseName(group string, partition int) string {
	return fmt.Sprintf("lease %s/%d", group, partition)
}
