package sim

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"zombiezen.com/go/sqlite"

	"github.com/seed-4c80c132/coord"
)

// server is the world's database: SQLite in memory, on one connection of its own that all connections of the nodes
// share. A transaction excludes every other statement, as SQLite's own do.
type server struct {
	db         *sqlite.Conn
	statements map[string]*sqlite.Stmt
	names      map[string]string // of coord's statements, by text
	ops        map[string]op     // what a text is, too
	tables     map[string]bool   // that are known to exist
	owner      *conn             // of the open transaction
	since      time.Time         // when it was opened
	busy       time.Time         // when one ended last that had been open for long
	waiting    []chan struct{}
}

func newServer() (*server, error) {
	db, err := sqlite.OpenConn(":memory:", sqlite.OpenReadWrite|sqlite.OpenCreate|sqlite.OpenMemory)
	if err != nil {
		return nil, err
	}
	s := &server{db: db, statements: map[string]*sqlite.Stmt{}, names: map[string]string{}, ops: map[string]op{}, tables: map[string]bool{}}
	for _, pragma := range []string{"PRAGMA journal_mode = MEMORY", "PRAGMA synchronous = OFF", "PRAGMA locking_mode = EXCLUSIVE",
		"CREATE TABLE account (name TEXT PRIMARY KEY, token INTEGER NOT NULL, writes INTEGER NOT NULL) STRICT"} {
		if _, err := s.exec(pragma, nil); err != nil {
			return nil, err
		}
	}
	return s, s.learnNames()
}

// learnNames reads the names of coord's statements, for people who read an event.
func (s *server) learnNames() error {
	files := coord.SQLite.SQL()
	paths, err := fs.Glob(files, "*.sql")
	if err != nil {
		return err
	}
	for _, path := range paths {
		text, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		file := strings.TrimSuffix(path, ".sql")
		for _, section := range strings.Split(string(text), "\n-- name: ")[1:] {
			name, body, _ := strings.Cut(section, "\n")
			s.names[essence(body)] = file + "." + strings.TrimSpace(name)
		}
	}
	return nil
}

// essence is a statement without its comments and the quotes of its names.
func essence(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i], _, _ = strings.Cut(line, "--")
	}
	return strings.TrimSuffix(strings.ReplaceAll(strings.Join(strings.Fields(strings.Join(lines, " ")), " "), `"`, ""), ";")
}

// name returns what to call a statement in an event.
func (s *server) name(text string) string {
	if name, ok := s.names[text]; ok {
		return name
	}
	short := essence(text)
	name, ok := s.names[short]
	if !ok {
		words := strings.Fields(short)
		name = strings.ToLower(strings.Join(words[:min(3, len(words))], " "))
	}
	s.names[text] = name
	return name
}

// rows is a statement's result, whole. It is also a driver.Result.
type rows struct {
	columns []string
	rows    [][]driver.Value
	changed int64
}

func (r *rows) Columns() []string            { return r.columns }
func (r *rows) Close() error                 { return nil }
func (r *rows) LastInsertId() (int64, error) { return 0, errors.ErrUnsupported }
func (r *rows) RowsAffected() (int64, error) { return r.changed, nil }

func (r *rows) Next(to []driver.Value) error {
	if len(r.rows) == 0 {
		return io.EOF
	}
	copy(to, r.rows[0])
	r.rows = r.rows[1:]
	return nil
}

func (r *rows) String() string {
	if len(r.rows) == 0 {
		return fmt.Sprintf("%d changed", r.changed)
	}
	return fmt.Sprint(r.rows)
}

// exec runs a text of one statement or several.
func (s *server) exec(text string, args []driver.NamedValue) (*rows, error) {
	if stmt, ok := s.statements[text]; ok {
		return s.step(stmt, args)
	}
	for rest := text; ; {
		stmt, trailing, err := s.db.PrepareTransient(rest)
		if err != nil {
			return nil, err
		}
		more := ""
		if trailing > 0 {
			more = rest[len(rest)-trailing:]
		}
		if rest == text && essence(more) == "" {
			s.statements[text] = stmt
			return s.step(stmt, args)
		}
		got, err := s.step(stmt, args)
		if err := errors.Join(err, stmt.Finalize()); err != nil || essence(more) == "" {
			return got, err
		}
		rest = more
	}
}

func (s *server) step(stmt *sqlite.Stmt, args []driver.NamedValue) (got *rows, err error) {
	defer func() { err = errors.Join(err, stmt.Reset()) }()
	for i := range stmt.BindParamCount() {
		switch v := args[i].Value.(type) {
		case nil:
			stmt.BindNull(i + 1)
		case int64:
			stmt.BindInt64(i+1, v)
		case bool:
			stmt.BindBool(i+1, v)
		case string:
			stmt.BindText(i+1, v)
		default:
			return nil, fmt.Errorf("argument %d is a %T", i+1, v)
		}
	}
	got = &rows{}
	for i := range stmt.ColumnCount() {
		got.columns = append(got.columns, stmt.ColumnName(i))
	}
	for {
		more, err := stmt.Step()
		if err != nil {
			return nil, err
		}
		if !more {
			got.changed = int64(s.db.Changes())
			return got, nil
		}
		row := make([]driver.Value, stmt.ColumnCount())
		for i := range row {
			switch stmt.ColumnType(i) {
			case sqlite.TypeInteger:
				row[i] = stmt.ColumnInt64(i)
			case sqlite.TypeText:
				row[i] = stmt.ColumnText(i)
			}
		}
		got.rows = append(got.rows, row)
	}
}

// has reports whether a table exists.
func (s *server) has(table string) bool {
	if !s.tables[table] {
		got, err := s.exec("SELECT 1 FROM sqlite_master WHERE name = ?1", []driver.NamedValue{{Value: table}})
		s.tables[table] = err == nil && len(got.rows) > 0
	}
	return s.tables[table]
}

// take opens a transaction.
func (s *server) take(c *conn) error {
	s.owner, s.since = c, time.Now()
	_, err := s.exec("BEGIN IMMEDIATE", nil)
	return err
}

// stalled returns when a transaction held up everything for long the last time.
func (s *server) stalled() time.Time {
	if s.owner != nil && time.Since(s.since) > 100*time.Millisecond {
		return time.Now()
	}
	return s.busy
}

// release ends the transaction of owner and wakes up those who wait for it.
func (s *server) release() {
	s.busy, s.owner = s.stalled(), nil
	for _, c := range s.waiting {
		close(c)
	}
	s.waiting = nil
}

func (s *server) close() error {
	var err error
	for _, stmt := range s.statements {
		err = errors.Join(err, stmt.Finalize())
	}
	return errors.Join(err, s.db.Close())
}

// op returns whether a statement writes.
func (s *server) op(text string) op {
	if kind, ok := s.ops[text]; ok {
		return kind
	}
	kind := opRead
	for _, word := range strings.Fields(strings.ToUpper(essence(text))) {
		switch word {
		case "CREATE":
			kind = opCreate
		case "INSERT", "UPDATE", "DELETE":
			kind = max(kind, opWrite)
		}
	}
	s.ops[text] = kind
	return kind
}
