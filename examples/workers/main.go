// Workers shows RunPartitions at work: a few worker processes share the partitions
// of one group, one of them is killed, and the others take over what it held. At the
// end the program checks from the workers' own records that no partition was ever
// worked on by two at once.
//
//	go run ./examples/workers
//	go run ./examples/workers -db postgres://user@host/database
//
// The workers are processes of this same program. What a service would copy is in
// worker.go; everything else starts, shows and judges it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// Exit statuses.
const (
	exitOK          = 0
	exitFailed      = 1 // a promise was broken, or the run could not be carried through
	exitUsage       = 2
	exitInterrupted = 130 // as a shell says of Ctrl-C
)

type options struct {
	db         string // a URL of Postgres; "" is SQLite in a temporary directory
	workers    int
	partitions int
	length     time.Duration
	timeline   string // the file of a picture of the run; "" is none
}

func main() {
	if text := os.Getenv(workerEnv); text != "" {
		os.Exit(workerMain(text))
	}
	opts, err := parse(os.Args[1:], os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(exitOK)
	case err != nil:
		os.Exit(exitUsage) // parse has said why
	}
	os.Exit(run(opts))
}

// run is the program: everything has been cleaned up when it returns.
func run(opts options) int {
	// Ctrl-C reaches the workers too, but they ignore it: they end when this
	// process closes their standard input, or ends in whatever way.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	view := newView(os.Stdout)
	h, err := perform(ctx, opts, view)
	if err != nil {
		fmt.Fprintln(os.Stderr, "workers:", err)
	}
	switch {
	case ctx.Err() != nil:
		view.end("interrupted: the workers have stopped and none is left\n")
		return exitInterrupted
	case err != nil:
		return exitFailed
	}
	wrong := check(h)
	view.verdict(h, wrong)
	if opts.timeline != "" {
		if err := draw(h, opts.timeline); err != nil {
			fmt.Fprintln(os.Stderr, "workers:", err)
			return exitFailed
		}
	}
	if len(wrong) > 0 {
		return exitFailed
	}
	return exitOK
}

const usage = `Workers starts a few worker processes that share the partitions of one group
by coord's RunPartitions, shows who holds what at which epoch, kills one
worker with SIGKILL, and shows its partitions move to the others. Then it checks
from the workers' own records that no partition was ever worked on by two at
once, that epochs only grew, and that what the killed worker held went to others.

Exit status: 0 if all of that holds, 1 if not, 130 after Ctrl-C.

Stop a worker by hand for some seconds (kill -STOP, then -CONT), and the verdict
may be another: the piece of work that it was in the midst of ends too late. No
lease can prevent that; Guard, inside the transaction that writes, does.

With -db the tables workers_* are made in that database and stay there; each run
uses names of its own in them.

`

// parse reads the command line, and tells out what is wrong with it.
func parse(args []string, out io.Writer) (options, error) {
	var opts options
	flags := flag.NewFlagSet("workers", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.Usage = func() {
		fmt.Fprint(out, usage)
		flags.PrintDefaults()
	}
	flags.StringVar(&opts.db, "db", "", "`URL` of a Postgres database, postgres://…; without it, SQLite in a temporary directory")
	flags.IntVar(&opts.workers, "workers", 4, "how many worker processes, 2 to 9")
	flags.IntVar(&opts.partitions, "partitions", 12, "how many partitions, 1 to 14")
	flags.DurationVar(&opts.length, "for", 10*time.Second, "how long the workers run, 3s to 1h; some seconds more if the machine is slow")
	flags.StringVar(&opts.timeline, "timeline", "", "write a picture of the run to `FILE.svg`: a lane for each partition, a colour for each worker")
	if err := flags.Parse(args); err != nil {
		return opts, err
	}
	err := opts.validate(flags.Args())
	if err != nil {
		fmt.Fprintf(out, "workers: %v (-h explains)\n", err)
	}
	return opts, err
}

// validate checks the flags. The table has room for 14 partitions in 80 columns.
func (o options) validate(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.workers < 2 || o.workers > 9:
		return fmt.Errorf("-workers is %d, not 2 to 9", o.workers)
	case o.partitions < 1 || o.partitions > 14:
		return fmt.Errorf("-partitions is %d, not 1 to 14", o.partitions)
	case o.length < 3*time.Second || o.length > time.Hour:
		return fmt.Errorf("-for is %s, not 3s to 1h", o.length)
	case o.db != "" && !isPostgres(o.db):
		return errors.New("-db is not the URL of a Postgres database, postgres://…")
	}
	return nil
}

func isPostgres(db string) bool {
	return strings.HasPrefix(db, "postgres://") || strings.HasPrefix(db, "postgresql://")
}

// database names the database to a person, without its password.
func (o options) database() string {
	if o.db == "" {
		return "SQLite"
	}
	u, err := url.Parse(o.db)
	if err != nil {
		return "Postgres"
	}
	return "Postgres at " + u.Host
}
