//go:build !unix

package testdb

import "testing"

// Cluster is a server that a test has to itself. There is none on this system.
type Cluster struct{}

func NewCluster(tb testing.TB, settings ...string) *Cluster {
	tb.Helper()
	tb.Skip("testdb: no server programs on this system")
	return nil
}

func (*Cluster) Configure(testing.TB, ...string)                {}
func (*Cluster) URL() string                                    { return "" }
func (*Cluster) Restart(testing.TB)                             {}
func (*Cluster) Start(testing.TB)                               {}
func (*Cluster) Stop(testing.TB)                                {}
func (*Cluster) Promote(testing.TB)                             {}
func (*Cluster) Standby(testing.TB, string, ...string) *Cluster { return nil }
