//go:build !unix

package testdb

import "testing"

// Private is a server of the test's own, which it may crash.
type Private struct{}

// NewPrivate skips the test.
func NewPrivate(tb testing.TB) *Private {
	tb.Helper()
	tb.Skip("testdb: no server of one's own on this system")
	return nil
}

func (*Private) URL() string      { return "" }
func (*Private) Start(testing.TB) {}
func (*Private) Crash(testing.TB) {}
