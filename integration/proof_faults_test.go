package integration

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"net/url"
	"testing"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/testdb"
)

// fault is a harm that is done to a run.
type fault struct {
	name     string
	short    bool                          // part of the short form
	pooler   bool                          // the workers come through PgBouncer
	cluster  func(*testing.T) *clusters    // the servers of the run's own
	prepare  func(*proof)                  // before anything else is done in the database
	inject   func(context.Context, *proof) // while the workers work, until ctx ends
	once     bool                          // it can't be injected again
	violates bool                          // coord can't stand it, and the README says so
}

var faults = []fault{
	{name: "none", inject: nothing},
	{name: "kill -9", short: true, inject: often(kill)},
	{name: "SIGSTOP past the TTL", short: true, inject: often(stopAndContinue)},
	{name: "black hole, both ways", short: true, inject: often(blackHole())},
	{name: "black hole, to the server", inject: often(blackHole(toServer))},
	{name: "black hole, to the client", inject: often(blackHole(toClient))},
	{name: "pg_terminate_backend", short: true, inject: often(terminate)},
	{name: "restart -m immediate", cluster: single, inject: often(restart)},
	{name: "pool exhausted", inject: often(exhaust)},
	{name: "default serializable", prepare: serializable, inject: nothing},
	{name: "PgBouncer, transaction mode", pooler: true, inject: often(kill)},
	{name: "clocks an hour off", prepare: skew, inject: often(stopAndContinue)},
	{name: "DDL storm", inject: often(changeTables)},
	{name: "disk full", prepare: breakable, inject: often(fillDisk)},
	{name: "promotion, synchronous", cluster: synchronous, once: true, inject: failOver},
	{name: "promotion, asynchronous", cluster: asynchronous, once: true, inject: failOver, violates: true},
}

func nothing(context.Context, *proof) {}

// often does harm again and again, at random moments.
func often(harm func(context.Context, *proof)) func(context.Context, *proof) {
	return func(ctx context.Context, p *proof) {
		for ctx.Err() == nil {
			harm(ctx, p)
			pause(ctx, rand.N(p.ttl/2))
		}
	}
}

func kill(_ context.Context, p *proof) {
	w := p.anyWorker()
	p.mark(w.slot, "killed")
	_ = w.cmd.Process.Kill()
	_ = w.cmd.Wait()
	p.launch(w)
}

func stopAndContinue(ctx context.Context, p *proof) {
	w := p.anyWorker()
	p.mark(w.slot, "stopped")
	if err := suspend(w.cmd.Process); err != nil {
		p.t.Error(err)
	}
	pause(ctx, p.ttl*5/4+rand.N(p.ttl/2))
	p.mark(w.slot, "continued")
	if err := resume(w.cmd.Process); err != nil {
		p.t.Error(err)
	}
}

func blackHole(directions ...int) func(context.Context, *proof) {
	return func(ctx context.Context, p *proof) {
		w := p.anyWorker()
		p.mark(w.slot, "black hole")
		w.proxy.swallow(directions...)
		pause(ctx, p.ttl*5/4+rand.N(p.ttl/2))
		p.mark(w.slot, "healed")
		w.proxy.heal()
	}
}

// terminate ends a few sessions.
func terminate(_ context.Context, p *proof) {
	p.mark("", "sessions terminated")
	p.exec(p.t, "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random() LIMIT 5) AS victims")
}

func restart(ctx context.Context, p *proof) {
	p.mark("", "server restarted")
	p.cluster.primary.Restart(p.t)
	pause(ctx, p.ttl)
}

func exhaust(ctx context.Context, p *proof) {
	w := p.anyWorker()
	p.mark(w.slot, "pool exhausted")
	if _, err := w.stdin.Write([]byte("exhaust\n")); err != nil {
		p.t.Error(err)
	}
	pause(ctx, p.ttl)
}

// forDatabase changes a setting of the database for the sessions to come.
func (p *proof) forDatabase(setting string) {
	var name string
	p.scan(p.t, "SELECT current_database()", &name)
	p.exec(p.t, `ALTER DATABASE "`+name+`" SET `+setting)
}

func serializable(p *proof) {
	p.forDatabase("default_transaction_isolation = 'serializable'")
	var level string
	if p.scan(p.t, "SHOW default_transaction_isolation", &level); level != "serializable" {
		p.t.Fatalf("the default isolation is %s", level)
	}
}

// skew sets the database's clock an hour off those of the nodes. (A node's own can't
// be moved alone on one machine; to the library it is the same.)
func skew(p *proof) {
	p.exec(p.t, "CREATE SCHEMA skewed")
	p.exec(p.t, "CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$")
	p.forDatabase("search_path = skewed, pg_catalog, public") // Found before the built-in one.
	var ahead int
	if p.scan(p.t, "SELECT round(extract(epoch FROM clock_timestamp() - pg_catalog.clock_timestamp()) / 60)::int", &ahead); ahead != 60 {
		p.t.Fatalf("the clock is %d minutes ahead", ahead)
	}
}

// changeTables is DDL on coord's tables that locks them, moves them or makes what is
// prepared stale.
func changeTables(ctx context.Context, p *proof) {
	tables := []string{"coord_lease", "coord_mutex", "coord_eidlock", "coord_reservation__proof__thing"}
	table := tables[rand.IntN(len(tables))]
	p.mark("", "DDL")
	for _, statement := range []string{
		"ALTER TABLE " + table + " ADD COLUMN more int",
		"CREATE INDEX CONCURRENTLY more ON " + table + " (more)",
		"VACUUM FULL " + table,
		"REINDEX TABLE " + table,
		"DROP INDEX more",
		"ALTER TABLE " + table + " DROP COLUMN more",
		"ANALYZE " + table,
	} {
		p.exec(p.t, statement)
	}
	c, err := coord.New(p.db, p.dialect, p.config())
	if err == nil {
		err = c.Migrate(context.Background(), proofScope)
		c.Close()
	}
	if err != nil {
		p.t.Error(err)
	}
	pause(ctx, rand.N(p.ttl/4))
}

// breakable prepares what lets every write fail as on a full disk.
func breakable(p *proof) {
	p.exec(p.t, "CREATE TABLE proof_disk (is_full boolean)")
	p.exec(p.t, "INSERT INTO proof_disk VALUES (false)")
	p.exec(p.t, `CREATE FUNCTION proof_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF (SELECT is_full FROM proof_disk) THEN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END IF;
		RETURN NULL;
	END $$`)
}

func fillDisk(ctx context.Context, p *proof) {
	for _, table := range []string{"coord_lease", "coord_mutex", "coord_eidlock", "coord_reservation__proof__thing"} {
		p.exec(p.t, "CREATE OR REPLACE TRIGGER full_disk BEFORE INSERT OR UPDATE ON "+table+" EXECUTE FUNCTION proof_write()")
	}
	p.mark("", "disk full")
	p.exec(p.t, "UPDATE proof_disk SET is_full = true")
	pause(ctx, p.ttl/2+rand.N(p.ttl))
	p.mark("", "disk has room")
	p.exec(p.t, "UPDATE proof_disk SET is_full = false")
}

// clusters are the servers of a run's own.
type clusters struct {
	primary, standby *testdb.Cluster
	link             *proxy // between the two; nil if it is not to be cut
}

func single(t *testing.T) *clusters { return &clusters{primary: testdb.NewCluster(t)} }

// synchronous is a primary that acknowledges what its standby has applied.
func synchronous(t *testing.T) *clusters {
	primary := testdb.NewCluster(t)
	standby := primary.Standby(t, "")
	db, err := sql.Open("postgres", primary.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, setting := range []string{"synchronous_standby_names = '*'", "synchronous_commit = 'remote_apply'"} {
		if _, err := db.Exec("ALTER SYSTEM SET " + setting); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Exec("SELECT pg_reload_conf()"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the standby is synchronous", func() bool {
		var state string
		_ = db.QueryRow("SELECT sync_state FROM pg_stat_replication").Scan(&state)
		return state == "sync"
	})
	return &clusters{primary: primary, standby: standby}
}

func asynchronous(t *testing.T) *clusters {
	primary := testdb.NewCluster(t)
	u, err := url.Parse(primary.URL())
	if err != nil {
		t.Fatal(err)
	}
	link := proxyTo(t, u.Host)
	return &clusters{primary: primary, standby: primary.Standby(t, link.addr()), link: link}
}

// failOver ends the primary and leads everybody to the promoted standby. What an
// asynchronous one has not been sent, it does not know.
func failOver(ctx context.Context, p *proof) {
	if p.cluster.link != nil {
		pause(ctx, p.ttl/2)
		p.mark("", "replication cut")
		p.cluster.link.swallow()
	}
	pause(ctx, p.ttl+rand.N(p.ttl/2))
	p.mark("", "failover")
	p.cluster.primary.Stop(p.t)
	p.cluster.standby.Promote(p.t)
	p.url = p.cluster.standby.URL()
	p.db = p.open(p.t)
	for _, w := range p.workers {
		w.proxy.redirect(p.host())
	}
	pause(ctx, 2*p.ttl)
}
