package coord

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// A Dialect is one database engine: a folder of SQL and a way to read the
// engine's errors. [Postgres] and [SQLite] are built in; anyone can write
// another outside this package.
//
// A file <primitive>.sql starts with the DDL of its table, which must be safe to
// repeat and record the table's format in coord_format. Sections follow, each
// opened by a line "-- name: <section>", with the same names in every engine: the
// built-in files say in a comment what each takes and returns. [New] reports
// sections that are missing or unknown. A missing file means that the engine does
// not support that primitive; only format.sql must be there.
//
// The files carry the default table names. A name that starts with coord_ is
// replaced by the configured one, quoted and qualified by the schema; right behind
// an apostrophe, as in 'coord_lease', it is a value and becomes the bare name.
//
// Parameters and columns are strings, int64 (microseconds for times and
// durations), booleans, and lists as one JSON text.
type Dialect interface {
	// Name is the engine's name, for error messages.
	Name() string
	// SQL holds the files, at its root.
	SQL() fs.FS
	// Classify says what kind of failure a driver's error is. It is never
	// called with nil.
	Classify(err error) Failure
}

// A Failure is what an error of the database means for the statement and its
// connection.
type Failure int

const (
	// FailureOther is any failure of the statement alone.
	FailureOther Failure = iota
	// FailureConnection is a failure of the connection. The statement may have
	// been committed all the same.
	FailureConnection
	// FailureRetry is a statement that did nothing and may be sent again: a
	// deadlock, a serialization failure, a busy database.
	FailureRetry
	// FailureContended is a statement that undid itself because it lost a race.
	FailureContended
)

// section is one named statement of a file and the field that holds its text.
type section struct {
	name string // with a "?" behind it, the section may be missing
	text *string
}

var (
	sectionLine = regexp.MustCompile(`^-- name: ([a-z_]+)$`)
	defaultName = regexp.MustCompile(`['"]*\bcoord_[a-z0-9_]+"?`)
	identifier  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// maxIdentifier is Postgres's limit in bytes. It truncates a longer name, and two
// tables become one.
const maxIdentifier = 63

// names turns the default table names of a file into the configured ones.
type names struct {
	schema, prefix string
	// One table, and what starts with its name, may have a name of its own.
	from, toSchema, to string
}

func (n names) validate() error {
	return wrap("new", cmp.Or(checkIdentifier("schema", n.schema), checkIdentifier("prefix", n.prefix)))
}

// checkIdentifier refuses what can't stand between quotes in SQL as it is. Empty
// is fine.
func checkIdentifier(what, name string) error {
	if name != "" && !identifier.MatchString(name) {
		return invalid("%s %q is not of letters, digits and _, a digit not first", what, name)
	}
	if len(name) > maxIdentifier {
		return invalid("%s %q is over %d bytes", what, name, maxIdentifier)
	}
	return nil
}

// table is the configured name for a default one.
func (n names) table(name string) (schema, table string) {
	if rest, ok := strings.CutPrefix(name, n.from); ok && n.from != "" {
		return n.toSchema, n.to + rest
	}
	return n.schema, n.prefix + strings.TrimPrefix(name, "coord_")
}

// value is how a default name's table is called in the format records.
func (n names) value(name string) string {
	schema, table := n.table(name)
	if schema != n.schema {
		return schema + "." + table
	}
	return table
}

// replace puts the configured names into text.
func (n names) replace(text string) (string, error) {
	var err error
	out := defaultName.ReplaceAllStringFunc(text, func(match string) string {
		name := strings.Trim(match, `'"`)
		schema, table := n.table(name)
		if tooLong := checkIdentifier("table name", table); tooLong != nil {
			err = tooLong
		}
		quoted := `"` + table + `"`
		if schema != "" {
			quoted = `"` + schema + `".` + quoted
		}
		switch {
		case strings.HasPrefix(match, `'"`): // an identifier inside a literal: '"coord_x"'
			return `'` + quoted
		case strings.HasPrefix(match, `'`): // a value
			return `'` + n.value(name)
		}
		return quoted
	})
	return out, err
}

// load reads the file of one primitive into sections and returns its DDL. ok is
// false if the dialect has no such file.
func load(d Dialect, n names, file string, sections ...section) (ddl string, ok bool, err error) {
	text, err := fs.ReadFile(d.SQL(), file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("coord: dialect %s: %w", d.Name(), err)
	}
	replaced, err := n.replace(string(text))
	if err != nil {
		return "", false, fmt.Errorf("coord: dialect %s: %s: %w", d.Name(), file, err)
	}
	ddl, found, err := parse(replaced)
	if err == nil {
		err = assign(found, sections)
	}
	if err != nil {
		return "", false, fmt.Errorf("coord: dialect %s: %s: %w", d.Name(), file, err)
	}
	return ddl, true, nil
}

// parse splits a file into its DDL and its named sections. Whole-line comments of
// a section are for the reader of the file and are not sent.
func parse(text string) (ddl string, sections map[string]string, err error) {
	sections = map[string]string{}
	var name string
	var body, head strings.Builder
	for line := range strings.Lines(text) {
		trimmed := strings.TrimSpace(line)
		if m := sectionLine.FindStringSubmatch(trimmed); m != nil {
			if name != "" {
				sections[name] = strings.TrimSpace(body.String())
			}
			name = m[1]
			body.Reset()
			if _, twice := sections[name]; twice {
				return "", nil, invalid("section %s stands twice", name)
			}
			continue
		}
		switch {
		case name == "":
			head.WriteString(line)
		case !strings.HasPrefix(trimmed, "--"):
			body.WriteString(line)
		}
	}
	if name != "" {
		sections[name] = strings.TrimSpace(body.String())
	}
	return strings.TrimSpace(head.String()), sections, nil
}

// assign fills the sections' fields and reports, by name, what is missing, empty
// or unknown.
func assign(found map[string]string, sections []section) error {
	var wrong []string
	for _, s := range sections {
		name, optional := strings.CutSuffix(s.name, "?")
		if *s.text = found[name]; *s.text == "" && !optional {
			wrong = append(wrong, "section "+name+" is missing")
		}
		delete(found, name)
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		wrong = append(wrong, "section "+name+" is unknown")
	}
	if wrong == nil {
		return nil
	}
	return invalid("%s", strings.Join(wrong, ", "))
}
