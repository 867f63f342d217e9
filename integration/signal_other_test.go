//go:build !unix

package integration

import "testing"

func stop(t *testing.T, _ *process) { t.Helper(); t.Skip("no way to suspend a process") }
func resume(*testing.T, *process)   {}
