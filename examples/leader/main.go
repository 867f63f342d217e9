// Leader shows RunLeader at work: a few processes elect a leader, which alone writes
// to a table. The leader is killed, another takes over, and a late write in the name
// of the one that was killed is refused. At the end the program checks from the table
// that no two ever wrote as leader at once.
//
//	go run ./examples/leader
//	go run ./examples/leader -db postgres://user@host/database
//
// The processes are this same program. What a service would copy is in node.go;
// everything else starts, shows and judges it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
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
	db    string // a URL of Postgres; "" is SQLite in a temporary directory
	nodes int
}

func main() {
	if text := os.Getenv(nodeEnv); text != "" {
		os.Exit(nodeMain(text))
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
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	begin := time.Now()
	wrong, err := perform(ctx, opts, func(format string, args ...any) {
		fmt.Printf("%5.1f s  %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	})
	switch {
	case ctx.Err() != nil:
		fmt.Println("interrupted: the processes have stopped and none is left")
		return exitInterrupted
	case err != nil:
		fmt.Fprintln(os.Stderr, "leader:", err)
		return exitFailed
	case len(wrong) > 0:
		fmt.Println("verdict: VIOLATED\n  " + strings.Join(wrong, "\n  "))
		return exitFailed
	}
	fmt.Println("verdict: ok, by the table: one leader at a time, each with a larger epoch than the last")
	return exitOK
}

const usage = `Leader starts a few processes that elect a leader by coord's RunLeader. The leader
alone writes to a table, guarded by its lease. It is killed with SIGKILL, another
takes over within the TTL of 1.5 s, and a late write in the name of the one that
was killed is refused. Then it ends them in order, and checks the table.

Exit status: 0 if all of that holds, 1 if not, 130 after Ctrl-C.

With -db the tables leader_* are made in that database and stay there; each run
uses names of its own in them.

`

// parse reads the command line, and tells out what is wrong with it.
func parse(args []string, out io.Writer) (options, error) {
	var opts options
	flags := flag.NewFlagSet("leader", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.Usage = func() {
		fmt.Fprint(out, usage)
		flags.PrintDefaults()
	}
	flags.StringVar(&opts.db, "db", "", "`URL` of a Postgres database, postgres://…; without it, SQLite in a temporary directory")
	flags.IntVar(&opts.nodes, "processes", 3, "how many processes, 2 to 9")
	if err := flags.Parse(args); err != nil {
		return opts, err
	}
	err := opts.validate(flags.Args())
	if err != nil {
		fmt.Fprintf(out, "leader: %v (-h explains)\n", err)
	}
	return opts, err
}

func (o options) validate(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.nodes < 2 || o.nodes > 9:
		return fmt.Errorf("-processes is %d, not 2 to 9", o.nodes)
	case o.db != "" && !strings.HasPrefix(o.db, "postgres://") && !strings.HasPrefix(o.db, "postgresql://"):
		return errors.New("-db is not the URL of a Postgres database, postgres://…")
	}
	return nil
}
