package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/seed-4c80c132/coord"
	_ "modernc.org/sqlite"
)

const (
	ttl  = 1500 * time.Millisecond // how soon a crash of the leader is noticed
	work = 50 * time.Millisecond   // between two writes
)

// nodeEnv makes a process of this program a node. It holds a nodeConfig. (In the
// environment, since everyone may read command lines, and the URL of a database may
// hold a password.)
const nodeEnv = "COORD_EXAMPLE_NODE"

type nodeConfig struct {
	Name   string
	Run    string // names the election, and its writes
	Driver string
	DSN    string
}

func nodeMain(text string) int {
	signal.Ignore(os.Interrupt, syscall.SIGHUP, syscall.SIGPIPE) // the parent decides, and may be gone
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // The parent closes the pipe, or dies, which closes it too.
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	var config nodeConfig
	err := json.Unmarshal([]byte(text), &config)
	if err == nil {
		err = runNode(ctx, config)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	return exitOK
}

// runNode leads whenever it is elected, until ctx ends. It has resigned when it
// returns, so that the next leader need not wait for the TTL.
func runNode(ctx context.Context, config nodeConfig) error {
	d, err := open(config.Driver, config.DSN, config.Name)
	if err != nil {
		return err
	}
	defer d.close()
	return d.c.RunLeader(ctx, config.Run, ttl, func(ctx context.Context, lease coord.Lease) error {
		for ctx.Err() == nil {
			if err := d.write(ctx, config.Run, lease); err != nil {
				return err // RunLeader calls again, if the lease is still ours.
			}
			select {
			case <-ctx.Done():
			case <-time.After(work):
			}
		}
		return nil
	})
}

// database is a pool and a Coord on it.
type database struct {
	*sql.DB
	c      *coord.Coord
	driver string
}

// open opens a database for a node, whose name is the owner of its leases.
func open(driver, dsn, name string) (*database, error) {
	dialect := coord.SQLite
	if driver == "pgx" {
		dialect = coord.Postgres
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, fmt.Errorf("open the %s database: %w", dialect.Name(), err)
	}
	c, err := coord.New(db, dialect, coord.Config{Prefix: "leader_", Owner: name, Timeout: ttl / 2})
	if err != nil {
		db.Close()
		return nil, err
	}
	return &database{db, c, driver}, nil
}

func (d *database) close() { _ = errors.Join(d.c.Close(), d.Close()) }

// write adds a row in a transaction that can commit only while the lease is held:
// from Guard on, nobody else can become leader before the transaction ends. So even a
// process that was suspended for an hour in the midst of this does no harm.
func (d *database) write(ctx context.Context, run string, lease coord.Lease) error {
	tx, err := d.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := d.c.Leases().Guard(ctx, tx, lease); err != nil {
		return err
	}
	const insert = `INSERT INTO leader_write (run, n, node, epoch)
SELECT CAST($1 AS text), count(*) + 1, CAST($2 AS text), CAST($3 AS bigint) FROM leader_write WHERE run = CAST($1 AS text)`
	if _, err := tx.ExecContext(ctx, d.text(insert), run, lease.Owner, lease.Epoch); err != nil {
		return err
	}
	return tx.Commit()
}

// text is a statement in the driver's way: in SQLite, $1 is a name.
func (d *database) text(statement string) string {
	if d.driver == "sqlite" {
		return strings.ReplaceAll(statement, "$", "?")
	}
	return statement
}
