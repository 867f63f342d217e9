package testdb

import (
	"testing"
)

// A cluster keeps what was committed when it crashes, and its standby, promoted,
// has what a synchronous primary has acknowledged.
func TestCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("two servers")
	}
	primary := NewCluster(t)
	standby := primary.Standby(t, "")
	db := connect(t, primary.URL())
	for _, statement := range []string{
		"ALTER SYSTEM SET synchronous_standby_names = '*'", "ALTER SYSTEM SET synchronous_commit = 'remote_apply'",
		"SELECT pg_reload_conf()", "CREATE TABLE kept (i int)",
	} {
		if _, err := db.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	db.Close()
	primary.Restart(t)
	again := connect(t, primary.URL())
	if _, err := again.Exec("INSERT INTO kept VALUES (1)"); err != nil {
		t.Fatal(err)
	}
	primary.Stop(t)
	standby.Promote(t)
	promoted := connect(t, standby.URL())
	if n := ask[int](t, promoted, "SELECT count(*) FROM kept"); n != 1 {
		t.Errorf("%d rows on the promoted standby, want 1", n)
	}
	if _, err := promoted.Exec("SET synchronous_commit = local; INSERT INTO kept VALUES (2)"); err != nil {
		t.Error(err)
	}
}
