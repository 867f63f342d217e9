package coord_test

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"os"
	"strings"
	"testing"
	"time"

	_ "github.com/lib/pq"
	"github.com/seed-4c80c132/coord"
)

// One node of many writes the report, and a node that has lost its lease without
// noticing can't.
func Example() {
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
