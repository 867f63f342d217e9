//go:build !unix

package testdb

import "testing"

// PgBouncer skips the test.
func PgBouncer(tb testing.TB, settings string) string {
	tb.Helper()
	tb.Skip("PGBOUNCER TESTS ARE SKIPPED on this system")
	return ""
}

func stopBouncers() {}
