package integration

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/seed-4c80c132/coord"
	"github.com/seed-4c80c132/coord/integration/history"
)

// proverOrders is what a process that proves is told.
type proverOrders struct {
	Name string        // of the process; what it holds is its own by this name
	Slot string        // of the line of processes that follow each other: reservations outlive one
	File string        // of its history
	TTL  time.Duration // of all that it holds
	Keys int           // that all contend for
	Pool int           // most connections of its pool
}

// prover is a process that acquires, keeps, writes and releases, with a few actors
// for each primitive, until its standard input ends.
type prover struct {
	proverOrders
	db  *sql.DB
	rec *history.Recorder
}

const actorsEach = 2 // of each primitive in a process

func prove(o orders, db *sql.DB, c *coord.Coord) error {
	c.Close() // It has a patience that does not suit.
	file, err := os.OpenFile(o.Prover.File, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	db.SetMaxOpenConns(o.Prover.Pool)
	c, err = coord.New(db, coord.Postgres, coord.Config{Timeout: o.Prover.TTL, NoPrepare: engineNamed(o.Engine).pooler})
	if err != nil {
		return err
	}
	defer c.Close()
	p := &prover{o.Prover, db, history.NewRecorder(file)}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var wg sync.WaitGroup
	for _, prim := range primitives {
		for i := range actorsEach {
			owner := fmt.Sprint(p.Name, ".", i)
			if prim.lasting {
				owner = fmt.Sprint(p.Slot, ".", i)
			}
			a, err := prim.actor(c, db, owner, p.TTL)
			if err != nil {
				return err
			}
			wg.Go(func() { p.act(ctx, prim, a, owner) })
		}
	}
	fmt.Println("ready")
	p.obey(ctx)
	cancel()
	wg.Wait()
	return nil
}

func engineNamed(name string) engine {
	for _, e := range engines {
		if e.name == name {
			return e
		}
	}
	panic("no engine " + name)
}

// obey does what standard input says, until its end.
func (p *prover) obey(ctx context.Context) {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if in.Text() == "exhaust" {
			go p.exhaust(ctx)
		}
	}
}

// exhaust takes all connections of the pool for longer than the TTL, as an
// application may.
func (p *prover) exhaust(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, p.TTL*3/2)
	defer cancel()
	for range p.Pool {
		go func() {
			if conn, err := p.db.Conn(ctx); err == nil {
				<-ctx.Done()
				conn.Close()
			}
		}()
	}
	<-ctx.Done()
}

// act is one actor's life.
func (p *prover) act(ctx context.Context, prim primitive, a actor, owner string) {
	for ctx.Err() == nil {
		key := fmt.Sprint("k", rand.IntN(p.Keys))
		within, cancel := context.WithTimeout(ctx, p.TTL)
		e := history.Event{Kind: history.Acquire, Primitive: prim.name, Key: key, Owner: owner, Sent: history.Now()}
		h, err := a.acquire(within, key)
		if err == nil {
			e.Token = h.token()
			t := &tenure{p: p, h: h, event: e}
			t.record(history.Acquire)
			t.keep(ctx)
		}
		cancel()
		pause(ctx, 5*time.Millisecond+rand.N(30*time.Millisecond))
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// tenure is one stretch of holding.
type tenure struct {
	p     *prover
	h     held
	event history.Event // the acquisition
	until time.Time     // as recorded last
}

// record writes an event down. It must have returned before the holder acts on it.
func (t *tenure) record(kind history.Kind) {
	e := t.event
	e.Kind = kind
	if kind == history.Acquire || kind == history.Renew {
		t.until = t.h.until()
		if e.Until = history.Forever; !t.until.IsZero() {
			e.Until = history.Shared(t.until)
		}
	}
	if err := t.p.rec.Record(e); err != nil {
		panic(err) // It would prove nothing.
	}
}

// keep holds for a while, mostly not for long, and writes now and then. One in twelve
// stops to renew and goes on to write, as if it had not noticed.
func (t *tenure) keep(ctx context.Context) {
	ttl := t.p.TTL
	length := 10*time.Millisecond + rand.N(ttl/8)
	if rand.IntN(6) == 0 {
		length = rand.N(2 * ttl)
	}
	careless := rand.IntN(12) == 0
	if careless {
		length = ttl + rand.N(ttl)
	}
	end, renewal := time.Now().Add(length), time.Now().Add(ttl/3)
	for ctx.Err() == nil && time.Now().Before(end) {
		if t.isLost() {
			t.lose(ctx)
			return
		}
		if rand.IntN(2) == 0 {
			t.write(ctx)
		}
		if !careless && time.Now().After(renewal) {
			renewal = time.Now().Add(ttl / 3)
			if !t.renew(ctx) {
				t.lose(ctx)
				return
			}
		}
		t.note()
		pause(ctx, ttl/20)
	}
	t.give(ctx)
}

// note records that it is held for longer than was known.
func (t *tenure) note() {
	if until := t.h.until(); !until.Equal(t.until) {
		t.record(history.Renew)
	}
}

func (t *tenure) renew(ctx context.Context) bool {
	within, cancel := context.WithTimeout(ctx, t.p.TTL)
	defer cancel()
	return !errors.Is(t.h.renew(within), coord.ErrLost) // Another error may pass.
}

// isLost is what a holder knows without asking.
func (t *tenure) isLost() bool {
	select {
	case <-t.h.lost():
		return true
	default:
	}
	until := t.h.until()
	return !until.IsZero() && !time.Now().Before(until)
}

// lose records a loss, and goes on all the same: the guard must refuse it.
func (t *tenure) lose(ctx context.Context) {
	t.record(history.Lost)
	if t.event.Token > 0 { // A reservation may be had again by confirming it.
		t.write(ctx)
	}
	t.free(ctx)
}

// give records the release before anything is sent.
func (t *tenure) give(ctx context.Context) {
	t.record(history.Release)
	t.free(ctx)
}

func (t *tenure) free(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*t.p.TTL)
	defer cancel()
	if t.event.Primitive == "lease" && t.isLost() {
		return // Its release goes by owner: it would end what this actor may acquire next.
	}
	_ = t.h.release(ctx, t.p.db)
}

// write commits a row under the guard.
func (t *tenure) write(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*t.p.TTL)
	defer cancel()
	sent := history.Now()
	err := t.commit(ctx)
	kind := history.Write
	switch {
	case errors.Is(err, coord.ErrLost):
		kind = history.Refused
	case err != nil:
		return
	}
	acquired := t.event.Sent
	t.event.Sent = sent
	t.record(kind)
	t.event.Sent = acquired
	if kind == history.Write {
		t.h.committed()
	}
}

func (t *tenure) commit(ctx context.Context) error {
	tx, err := t.p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	what, err := t.h.guard(ctx, tx)
	if err != nil {
		return err
	}
	if err := logWrite(ctx, tx, t.event.Primitive, t.event.Key, t.event.Owner, t.event.Token, what); err != nil {
		return err
	}
	pause(ctx, rand.N(5*time.Millisecond)) // So that others come in the midst of it.
	return tx.Commit()
}
