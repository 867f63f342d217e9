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
// concurrent use. Nothing renews a lease but the caller, every TTL/3 or so;
// [Coord.RunPartitions] renews what it has acquired itself.
//
// Renew runs on one connection, one call at a time, which the Coord borrows from the pool
// once and keeps for what keeps things alive; it never waits behind the application for a
// connection. If the pool is limited to one, the connection is given back after each call.
// A Renew whose context ends before it is sent is not sent; once sent, it waits for the
// database for at most [Config.Timeout]. The other methods use the pool.
type LeaseStore struct {
	c     *Coord
	table *table

	acquire string // (group, partition, owner, ttl, now, attempt) row of (granted, owner, epoch, expires), or none
	holder  string // (group, partition, owner, now) row of (owner, expires) if another has it, or none
	undo    string // (group, partition, owner, attempt) changes the row of that attempt
	renew   string // (group, partitions json, owner, ttl, now) rows of (partition, epoch, expires, renewed or locked)
	release string // (group, partition, owner, epoch, attempt) changes the row once
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
func (s *LeaseStore) Acquire(ctx context.Context, group string, partition int, owner string,
	ttl time.Duration) (Lease, error) {
	return s.take(ctx, group, partition, owner, ttl, false)
}

// take is Acquire. If now is set, it waits for nobody: that it would have to is an
// [ErrHeld] too.
func (s *LeaseStore) take(ctx context.Context, group string, partition int, owner string,
	ttl time.Duration, now bool) (Lease, error) {
	if err := cmp.Or(checkLease(group, partition, owner), checkTTL(ttl)); err != nil {
		return Lease{}, wrap("acquire lease", err)
	}
	what := leaseName(group, partition)
	want := Lease{Group: group, Partition: partition, Owner: owner}
	got, held, err := acquireInTurn(ctx, s.c, acquisition[Lease]{what: what, table: s.table, now: now, renewed: true,
		try: func(ctx context.Context, on conn, attempt int64) (Lease, *HeldError, error) {
			return s.try(ctx, on, want, ttl, attempt)
		},
		undo: func(ctx context.Context, on conn, attempt int64) (bool, error) {
			n, err := on.exec(ctx, s.undo, group, partition, owner, attempt)
			return n > 0, err
		}})
	return granted("acquire "+what, got, held, err)
}

// try sends the acquisition. On engines that can't name the holder in the same statement,
// and when a rival was faster, it reads who it is.
func (s *LeaseStore) try(ctx context.Context, on conn, want Lease, ttl time.Duration,
	attempt int64) (Lease, *HeldError, error) {
	var granted bool
	var holder string
	var expires int64
	sent := time.Now()
	_, err := on.row(ctx, s.acquire, []any{want.Group, want.Partition, want.Owner, micros(ttl), s.c.now(), attempt}, &granted, &holder, &want.Epoch, &expires)
	if err == nil && holder == "" {
		_, err = on.row(ctx, s.holder, []any{want.Group, want.Partition, want.Owner, s.c.now()}, &holder, &expires)
	}
	switch {
	case err != nil:
		return Lease{}, nil, err
	case granted:
		want.ExpiresAt, want.Deadline = time.UnixMicro(expires), sent.Add(ttl)
		return want, nil, nil
	case holder == "":
		return Lease{}, nil, errLocked
	}
	return Lease{}, &HeldError{leaseName(want.Group, want.Partition), holder, time.UnixMicro(expires)}, nil
}

// Renew extends those of the partitions that are still owner's and have not
// expired to ttl from now, by one statement, and returns them, ordered by
// partition, their epochs unchanged. A partition that is missing from the result
// is lost. The caller compares epochs: a second process under the same owner name
// may have taken a partition over. With no partitions nothing is sent. If another
// transaction keeps some of the rows locked for [Config.Timeout], Renew returns an error,
// with the leases that it has renewed last: the others are not lost.
func (s *LeaseStore) Renew(ctx context.Context, group string, partitions []int, owner string,
	ttl time.Duration) ([]Lease, error) {
	partitions = slices.Compact(slices.Sorted(slices.Values(partitions)))
	lowest := 0
	if len(partitions) > 0 {
		lowest = partitions[0]
	}
	if err := cmp.Or(checkLease(group, lowest, owner), checkTTL(ttl)); err != nil || len(partitions) == 0 {
		return nil, wrap("renew leases", err)
	}
	leases, err := run(ctx, s.c, s.c.renewing(ttl), s.table, func(ctx context.Context, on conn) ([]Lease, error) {
		leases, locked, err := s.extend(ctx, on, group, partitions, owner, ttl)
		if err == nil && len(locked) > 0 {
			err = errLocked
		}
		return leases, err
	})
	return leases, wrap("renew leases "+group, err)
}

// renewFree is Renew that does not wait for rows which another transaction has locked. It
// calls answer with their partitions too, of which it is not known whether they are still
// owner's, and with the time just before the statement was sent.
func (s *LeaseStore) renewFree(ctx context.Context, patience time.Duration, group string, partitions []int,
	owner string, ttl time.Duration, answer func(sent time.Time, leases []Lease, locked []int)) error {
	on := where{session: s.c.session, patience: patience, waits: true}
	_, err := run(ctx, s.c, on, s.table, func(ctx context.Context, on conn) (struct{}, error) {
		sent := time.Now()
		leases, locked, err := s.extend(ctx, on, group, partitions, owner, ttl)
		if err == nil {
			answer(sent, leases, locked)
		}
		return struct{}{}, err
	})
	return wrap("renew leases "+group, err)
}

// extend sends the renewal, and returns what is still owner's and the partitions whose rows
// are locked.
func (s *LeaseStore) extend(ctx context.Context, on conn, group string, partitions []int,
	owner string, ttl time.Duration) (leases []Lease, locked []int, err error) {
	leases = make([]Lease, 0, len(partitions))
	var partition, epoch, expires int64 // int64, since database/sql reads an int by way of its text
	var renewed bool
	sent := time.Now()
	err = on.each(ctx, s.renew, []any{group, jsonList(partitions), owner, micros(ttl), s.c.now()}, func(row func(...any) error) error {
		err := row(&partition, &epoch, &expires, &renewed)
		if renewed {
			leases = append(leases, Lease{group, int(partition), owner, epoch, time.UnixMicro(expires), sent.Add(ttl)})
		} else {
			locked = append(locked, int(partition))
		}
		return err
	})
	slices.SortFunc(leases, func(a, b Lease) int { return cmp.Compare(a.Partition, b.Partition) })
	return leases, locked, err
}

// Release gives the lease up and keeps its row, so that the epoch continues. It goes
// by owner, not by epoch: a former process of that name ends its successor's lease.
// It returns true the first time the owner releases it, even after it expired as long
// as nobody has taken it, and false otherwise. It runs even if ctx has ended, for at most
// [Config.Timeout], and is repeated if the connection breaks.
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
	attempt := s.c.attempts.Add(1)
	changed, err := run(ctx, s.c, where{}, s.table, func(ctx context.Context, on conn) (int64, error) {
		return on.exec(ctx, s.release, group, partition, owner, epoch, attempt)
	})
	return changed > 0, wrap("release "+leaseName(group, partition), err)
}

// Owners returns the leases of a group that have not expired, ordered by
// partition.
func (s *LeaseStore) Owners(ctx context.Context, group string) ([]Lease, error) {
	if err := checkText("group", group); err != nil {
		return nil, wrap("owners of leases", err)
	}
	leases, err := run(ctx, s.c, where{}, s.table, func(ctx context.Context, on conn) (leases []Lease, err error) {
		var owner string
		var partition, epoch, expires int64
		err = on.each(ctx, s.owners, []any{group, s.c.now()}, func(row func(...any) error) error {
			err := row(&partition, &owner, &epoch, &expires)
			leases = append(leases, Lease{Group: group, Partition: int(partition), Owner: owner, Epoch: epoch, ExpiresAt: time.UnixMicro(expires)})
			return err
		})
		return leases, err
	})
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
	if err := cmp.Or(checkTx(tx), checkLease(lease.Group, lease.Partition, lease.Owner)); err != nil {
		return wrap("guard lease", err)
	}
	err := s.c.guard(ctx, tx, s.table, s.guard, lease.Group, lease.Partition, lease.Owner, lease.Epoch, s.c.now())
	return wrap("guard "+leaseName(lease.Group, lease.Partition), err)
}

func checkLease(group string, partition int, owner string) error {
	if partition < 0 {
		return invalid("partition %d is negative", partition)
	}
	return cmp.Or(checkText("group", group), checkText("owner", owner))
}

func leaseName(group string, partition int) string {
	return fmt.Sprintf("lease %s/%d", group, partition)
}
