package coord

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
)

// FuzzParse: what the loader of .sql files makes of any text. Every header opens one
// section, none twice, and what was read reads the same again.
func FuzzParse(f *testing.F) {
	for _, d := range []Dialect{Postgres, SQLite} {
		files, err := fs.Glob(d.SQL(), "*.sql")
		if err != nil {
			f.Fatal(err)
		}
		for _, name := range files {
			text, err := fs.ReadFile(d.SQL(), name)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(string(text))
		}
	}
	f.Add("-- name: a\n-- name: a\n")
	f.Add("x\r\n-- name: a\r\n  -- no\r\ny -- yes\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		ddl, sections, err := parse(text)
		headers, twice := headersOf(text)
		if twice != (err != nil) || err != nil && !errors.Is(err, ErrInvalid) {
			t.Fatalf("parse = %v, though a section stands twice: %v", err, twice)
		}
		if err != nil {
			return
		}
		if len(sections) != headers {
			t.Errorf("%d sections of %d headers", len(sections), headers)
		}
		again := ddl
		for name, body := range sections {
			again += "\n-- name: " + name + "\n" + body
		}
		ddl2, sections2, err := parse(again)
		if err != nil || ddl2 != ddl || len(sections2) != len(sections) {
			t.Fatalf("parse(%q) = %q, %q, %v, want %q, %q", again, ddl2, sections2, err, ddl, sections)
		}
		for name, body := range sections {
			if sections2[name] != body {
				t.Errorf("section %s reads %q, and again %q", name, body, sections2[name])
			}
		}
		checkReplaced(t, text)
	})
}

// headersOf counts the headers of a file, and tells whether one stands twice.
func headersOf(text string) (headers int, twice bool) {
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "-- name: ")
		if !ok || name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz_") != "" {
			continue
		}
		headers++
		twice = twice || seen[name]
		seen[name] = true
	}
	return headers, twice
}

// checkReplaced: other names come in for the default ones, and nothing else changes.
func checkReplaced(t *testing.T, text string) {
	t.Helper()
	out, err := names{prefix: "coord_"}.replace(text)
	if err != nil {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("replace = %v", err)
		}
		return
	}
	bare := func(s string) string { return strings.NewReplacer(`"`, "", `'`, "").Replace(s) }
	if bare(out) != bare(text) {
		t.Errorf("replace by the same names makes %q of %q", out, text)
	}
	other, err := names{schema: "s", prefix: "p_"}.replace(text)
	if err != nil {
		t.Fatal(err)
	}
	if defaultName.MatchString(other) {
		t.Errorf("%q is left in %q", defaultName.FindString(other), other)
	}
}

// FuzzIdentifier: what is accepted as part of a name stands between quotes as it is,
// and a table's name says which type it is of.
func FuzzIdentifier(f *testing.F) {
	for _, seed := range []string{"", "coord_", "1a", `a"b`, "a b", "ä", "a\x00", "a\n", "a__b", "_a", "a_", strings.Repeat("x", 63), strings.Repeat("x", 64)} {
		f.Add(seed, "user")
	}
	f.Fuzz(func(t *testing.T, name, other string) {
		if accepted := checkIdentifier("name", name) == nil; accepted != plain(name) {
			t.Fatalf("%q is accepted: %v, want %v", name, accepted, plain(name))
		}
		if plain(name) {
			checkPrefixed(t, name)
		}
		if checkTypeName("context", name) != nil || checkTypeName("aggregate", other) != nil {
			return
		}
		if !plain(name) && len(name) <= maxIdentifier || name != strings.ToLower(name) {
			t.Errorf("%q is accepted as a context", name)
		}
		if context, aggregate, _ := strings.Cut(name+"__"+other, "__"); context != name || aggregate != other {
			t.Errorf("the table of %q and %q is that of %q and %q", name, other, context, aggregate)
		}
	})
}

// plain is what checkIdentifier accepts, in other words.
func plain(name string) bool {
	for i, c := range []byte(name) {
		letter := c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return len(name) <= 63
}

// checkPrefixed: a prefix makes one quoted name of every default name, or is refused
// for its length; it is never cut off.
func checkPrefixed(t *testing.T, prefix string) {
	t.Helper()
	n := names{prefix: prefix, schema: prefix}
	want := `"` + prefix + `lease"`
	if prefix != "" {
		want = `"` + prefix + `".` + want
	}
	got, err := n.replace("coord_lease")
	if tooLong := len(prefix+"lease") > 63; tooLong != (err != nil) {
		t.Errorf("replace with prefix %q = %v", prefix, err)
	}
	if err == nil && got != want {
		t.Errorf("replace with prefix %q = %s, want %s", prefix, got, want)
	}
}
