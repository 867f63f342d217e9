package coord_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	_ "github.com/lib/pq"
	"github.com/seed-4c80c132/coord"
)

// The nodes of a service share an outbox of sixteen partitions. Whoever has one sends
// from it, and a node that has lost one without noticing writes nothing.
func Example() {
	ctx := context.Background()
	db, err := sql.Open("postgres", "postgres://localhost/app")
	check(err)

	c, err := coord.New(db, coord.Postgres, coord.Config{Logger: slog.Default()})
	check(err)
	defer c.Close()

	send := func(ctx context.Context, lease coord.Lease) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := c.Leases().Guard(ctx, tx, lease); err != nil { // First in the transaction.
			return err // Another node has the partition by now. If not, nobody can take it over until tx ends.
		}
		if _, err := tx.ExecContext(ctx, "UPDATE outbox SET sent = true WHERE partition = $1", lease.Partition); err != nil {
			return err
		}
		return tx.Commit()
	}
	// On every node, until ctx ends, such as signal.NotifyContext's at a SIGTERM:
	cfg := coord.PartitionConfig{Service: "mailer", Group: "outbox", Partitions: 16}
	err = c.RunPartitions(ctx, cfg, func(ctx context.Context, lease coord.Lease) error {
		for ctx.Err() == nil { // Until the partition moves to another node, or is lost.
			if err := send(ctx, lease); err != nil {
				return err // It is logged, and we are called again if the partition is still ours.
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
		return nil
	})
	check(err)
}

// One process of many, the leader, tidies up every hour.
func ExampleCoord_RunLeader() {
	ctx := context.Background()
	var c *coord.Coord

	check(c.RunLeader(ctx, "tidy", 0, func(ctx context.Context, lease coord.Lease) error {
		for {
			fmt.Println("tidying as leader, at epoch", lease.Epoch)
			select {
			case <-ctx.Done(): // Not leader any more, or told to end.
				return nil
			case <-time.After(time.Hour):
			}
		}
	}))
}

// One node of many writes the report, and a node that has lost its lease without
// noticing can't.
func ExampleLeaseStore() {
	ctx := context.Background()
	db, err := sql.Open("postgres", "postgres://localhost/app")
	check(err)

	c, err := coord.New(db, coord.Postgres, coord.Config{})
	check(err)
	defer c.Close()

	lease, err := c.Leases().Acquire(ctx, "reports", 0, c.Owner(), 30*time.Second)
	if errors.Is(err, coord.ErrHeld) {
		return // Another node has it.
	}
	check(err)
	tx, err := db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	check(c.Leases().Guard(ctx, tx, lease)) // From here on nobody can take over until tx ends.
	_, err = tx.ExecContext(ctx, "UPDATE report SET total = total + 1")
	check(err)
	check(tx.Commit())
}

// A job that runs once per night, however many replicas are told to start it: the
// mutex lets one at a time through, and the row says who was first. The guard makes
// the two one: no replica that has lost the lock can write the row.
func ExampleMutex_Do() {
	ctx := context.Background()
	db, err := sql.Open("postgres", "postgres://localhost/app")
	check(err)
	c, err := coord.New(db, coord.Postgres, coord.Config{})
	check(err)
	defer c.Close()
	driver, err := c.TableDriver(coord.DriverConfig{})
	check(err)
	mutex, err := coord.NewMutex(driver, coord.MutexConfig{})
	check(err)

	check(mutex.Do(ctx, "nightly-report", func(ctx context.Context, lock *coord.Lock) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := lock.Guard(ctx, tx); err != nil {
			return err
		}
		first, err := tx.ExecContext(ctx, "INSERT INTO report (night) VALUES (current_date) ON CONFLICT DO NOTHING")
		if err != nil {
			return err
		}
		if n, err := first.RowsAffected(); n == 0 || err != nil {
			return err // Another replica has done it.
		}
		return tx.Commit()
	}))
}

// A write that only the holder of the lock can make, wherever it has been
// suspended in between.
func ExampleLock_Guard() {
	ctx := context.Background()
	var db *sql.DB
	var mutex *coord.Mutex

	lock, err := mutex.TryLock(ctx, "account/4711")
	if errors.Is(err, coord.ErrHeld) {
		return
	}
	check(err)
	defer lock.Unlock(ctx)
	tx, err := db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	if errors.Is(lock.Guard(ctx, tx), coord.ErrLost) {
		return // Somebody else has the account by now.
	}
	_, err = tx.ExecContext(ctx, "UPDATE account SET balance = balance - 10 WHERE id = 4711")
	check(err)
	check(tx.Commit())
}

// A user signs up under a name that nobody else may have: the command reserves it,
// does what takes time, and stores its event and confirms the name in one
// transaction. If the command fails, the name is free for the next.
func ExampleReservationStore() {
	ctx := context.Background()
	db, err := sql.Open("postgres", "postgres://localhost/app")
	check(err)
	c, err := coord.New(db, coord.Postgres, coord.Config{})
	check(err)
	defer c.Close()
	names := coord.ReservationScope{Context: "accounts", Aggregate: "user", Namespace: "user_name"}

	signUp := func(user coord.AggregateRef, name, command string) (err error) {
		_, err = c.Reservations().Reserve(ctx, names, name, user, command, time.Minute)
		if errors.Is(err, coord.ErrHeld) {
			return errors.New("this name is taken")
		}
		if err != nil {
			return err
		}
		defer func() {
			if err != nil {
				_, _ = c.Reservations().Abandon(ctx, names, name, user, command) // Else the hold expires in a minute.
			}
		}()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		const version = 1 // of the event among the user's
		_, err = tx.ExecContext(ctx, "INSERT INTO event (stream, version, type, name) VALUES ($1, $2, 'signed up', $3)", user.ID, version, name)
		if err != nil {
			return err
		}
		outcome, err := c.Reservations().WithTx(tx).Confirm(ctx, names, name, user, version)
		if err != nil {
			return err
		}
		if outcome == coord.ConfirmTaken || outcome == coord.ConfirmStale {
			return fmt.Errorf("the name was lost: %v", outcome) // The hold had expired, and another was faster.
		}
		return tx.Commit()
	}
	check(signUp(coord.AggregateRef{ID: "user-4711"}, "gopher", "command-1"))
}

// An auditor approves a transfer between accounts: it locks all of them or none, takes
// its time to look at each, and writes its verdict under a guard. An auditor that has
// been suspended for longer than its locks last can't write one.
func ExampleEIDLocker() {
	ctx := context.Background()
	db, err := sql.Open("postgres", "postgres://localhost/bank")
	check(err)
	c, err := coord.New(db, coord.Postgres, coord.Config{})
	check(err)
	defer c.Close()
	locker, err := c.EIDLocker(coord.EIDConfig{})
	check(err)

	audit := func(transfer string, accounts ...string) error {
		if err := locker.AcquireLocks(ctx, transfer, accounts...); err != nil {
			return err // errors.Is(err, coord.ErrAcquireTimeout): one of them is being audited, and still is.
		}
		defer locker.ReleaseLocks(ctx, transfer)
		work, stop := context.WithCancel(ctx)
		defer stop()
		go func() {
			select {
			case <-locker.Lost(transfer):
				stop() // What is left of the audit would be for nothing.
			case <-work.Done():
			}
		}()
		for _, account := range accounts {
			if err := review(work, account); err != nil {
				return err
			}
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := locker.Guard(ctx, tx, transfer); err != nil {
			return err // errors.Is(err, coord.ErrLost): another may be at these accounts by now.
		}
		if _, err := tx.ExecContext(ctx, "UPDATE transfer SET approved = true WHERE id = $1", transfer); err != nil {
			return err
		}
		return tx.Commit()
	}
	check(audit("transfer-1", "alice", "bob", "fees"))
}

// review stands for what takes an auditor long.
func review(context.Context, string) error { return nil }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// TestREADME: the README's example is Example, which compiles.
func TestREADME(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(readme), "```go\n")
	snippet, _, ok := strings.Cut(rest, "```")
	var indented strings.Builder
	for line := range strings.Lines(snippet) {
		if line != "\n" {
			line = "\t" + line
		}
		indented.WriteString(line)
	}
	if !ok || snippet == "" || !strings.Contains(string(source), indented.String()) {
		t.Errorf("README's first example is not part of example_test.go:\n%s", snippet)
	}
}
