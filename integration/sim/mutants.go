package sim

// mutant is a seeded bug that the simulator has to find.
type mutant struct {
	name    string // short, kebab-case
	what    string // what goes wrong with it, one plain sentence
	patches []patch
}

// mutants are bugs that a change of the library could bring. The first ones are faults that older versions had.
var mutants = []mutant{
	// Faults of older versions.

	{"hung-dial", "A dial for the renewals' connection that hangs is waited for without bound, with the turn taken, so renewals stop.", []patch{
		{"session.go", "kept, err := s.connect(ctx, patience)", "kept, err := s.c.connect(context.WithoutCancel(ctx), s.suspect)"},
	}},
	{"connection-never-replaced", "The renewals' connection is kept after it failed, so no renewal ever comes through again.", []patch{
		{"session.go", "errors.As(err, new(panicked)), err != nil && s.c.classify(err) == FailureConnection:", "errors.As(err, new(panicked)):"},
	}},
	{"lost-reply-not-undone", "An acquisition whose connection broke before the reply came is not taken back, so it belongs to nobody until its TTL.", []patch{
		{"operation.go", "(sending.ctx.Err() != nil || c.classify(err) == FailureConnection)", "sending.ctx.Err() != nil"},
	}},
	{"granted-to-nobody", "An acquisition whose caller has left while its statement was in flight is not taken back.", []patch{
		{"operation.go", "case abandoned && !sending.open(): // It will never be sent.", "case abandoned:"},
	}},
	{"pile-up", "A caller whose context ends leaves the queue of its process though its statement is in flight, and the next one sends another.", []patch{
		{"queue.go", `		var left orphan // The place in the queue is kept until that is settled.
		errors.As(failure, &left)
		if failure = wrap(doing, ended(ctx)); left.settled != nil {
			failure = orphan{failure, left.settled}
		}
`, `		failure = wrap(doing, ended(ctx))
`},
	}},
	{"release-never-sent", "A release whose context has ended is not sent.", []patch{
		{"life.go", "context.WithValue(context.WithoutCancel(ctx), releasing{}, true)", "context.WithValue(ctx, releasing{}, true)"},
	}},
	{"release-not-repeated", "A release is not sent again when its connection breaks.", []patch{
		{"operation.go", "if !c.isLocked(err) && (!isRelease(ctx) || err == nil || c.classify(err) != FailureConnection) {", "if !c.isLocked(err) {"},
	}},
	{"convoy", "A set of ids that waits for one of them keeps other callers of its process from the ids that are free.", []patch{
		{"queue.go", "got, name, err := try()", "got, _, err := try()"},
		{"queue.go", "		q.keepOnly(p, name)\n", ""},
	}},
	{"first-use-of-the-caller", "The first use of a table ends with the context of the caller who began it, so callers with short deadlines never get the table made.", []patch{
		{"table.go", "use, begun := c.firstUse(t, afresh)", "use, begun := c.firstUse(ctx, t, afresh)"},
		{"table.go", "func (c *Coord) firstUse(t *table, afresh bool)", "func (c *Coord) firstUse(ctx context.Context, t *table, afresh bool)"},
		{"table.go", "c.busy.Go(func() { c.serve(t, t.use) })", "c.busy.Go(func() { c.serve(ctx, t, t.use) })"},
		{"table.go", `func (c *Coord) serve(t *table, use *firstUse) {
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.Timeout)`, `func (c *Coord) serve(ctx context.Context, t *table, use *firstUse) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)`},
	}},
	{"renewals-given-up-early", "A renewal is given up after a tenth of its TTL, and its late reply does not count, so slow statements lose what is held.", []patch{
		{"keeper.go", "f.patience = min(f.patience, k.ttl/3)", "f.patience = min(f.patience, k.ttl/10)"},
		{"session.go", "ctx, cancel := context.WithTimeout(ctx, s.c.cfg.Timeout) // A renewal that comes through late still counts.", "ctx, cancel := context.WithTimeout(ctx, patience)"},
	}},

	// Renewals, deadlines and losses.

	{"renewal-by-name", "Mutexes are renewed by name alone, so a stale holder keeps the next one's row and is never told of its loss.", []patch{
		{"sql/sqlite/mutex.sql", "WHERE coord_mutex.name = asked.name AND coord_mutex.fence = asked.fence\n", "WHERE coord_mutex.name = asked.name\n"},
		{"mutex_table.go", "			err := row(&of.key, &of.fence, &ok)\n", "			err := row(&of.key, &of.fence, &ok)\n			of.fence = 0\n"},
		{"mutex_table.go", "found[heldLock{key: held.key, fence: held.fence}]", "found[heldLock{key: held.key}]"},
	}},
	{"grant-deadline-from-reply", "The deadline of a mutex counts from the reply to its acquisition, so it ends after the row's.", []patch{
		{"mutex_table.go", "Deadline: sent.Add(ttl)}", "Deadline: time.Now().Add(ttl)}"},
	}},
	{"renewal-deadline-from-reply", "Deadlines count from the reply to a renewal, so they end after the rows'.", []patch{
		{"keeper.go", "k.renewed(r.sent)", "k.renewed(time.Now())"},
	}},
	{"loss-by-answer-alone", "Nothing ends at its deadline: the watchdog asks for another renewal, and a hold is lost only when one answers that it is gone.", []patch{
		{"keeper.go", "func() { k.end(ErrLost) })", "b.run)"},
		{"keeper.go", `	if ends := k.ends(); k.ttl > 0 && !time.Now().Before(ends) {
		k.end(ErrLost)
	}
`, ""},
	}},
	{"renewals-stop-after-failure", "After a renewal without an answer the next one is not planned.", []patch{
		{"keeper.go", "	b.flight = nil\n	b.schedule()\n", "	b.flight = nil\n	if r != nil {\n		b.schedule()\n	}\n"},
	}},
	{"late-renewal-shortens", "A renewal of a mutex that arrives after a later one sets the expiry back.", []patch{
		{"sql/sqlite/mutex.sql", `    expires_at = CASE WHEN coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) < dated THEN expires_at
        ELSE coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + asked.ttl END
`, `    expires_at = coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + asked.ttl
`},
	}},
	{"renewal-revives-lease", "A renewal revives a lease that has expired or was released.", []patch{
		{"sql/sqlite/lease.sql", `AND partition IN (SELECT value FROM json_each(?2))
AND expires_at > coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
`, `AND partition IN (SELECT value FROM json_each(?2))
`},
	}},
	{"lost-not-closed", "The channel of Lost stays open when a set of ids is lost.", []patch{
		{"eidlock.go", "		close(s.lost)\n", ""},
	}},
	{"unlock-hides-loss", "Unlock and Do return nil for a mutex that was lost if nobody has taken it meanwhile.", []patch{
		{"mutex.go", "lost := l.keeper.stop()", "_ = l.keeper.stop()"},
		{"mutex.go", "if lost != nil || err == nil && !released {", "if err == nil && !released {"},
	}},
	{"unlock-leaves-renewal", "Unlock does not end the renewal: Done stays open, and Err becomes ErrLost later.", []patch{
		{"mutex.go", "lost := l.keeper.stop()", "lost := l.keeper.err()"},
	}},

	// Tokens, attempts and what is taken back.

	{"token-reused-after-purge", "The token of a mutex goes back after a Purge of the rows with the largest ones.", []patch{
		{"sql/sqlite/mutex.sql", "INTEGER PRIMARY KEY AUTOINCREMENT,", "INTEGER PRIMARY KEY,"},
	}},
	{"set-token-from-own-rows", "The token of a set of ids is drawn from the rows of its ids, and goes back after a Purge.", []patch{
		{"sql/sqlite/eidlock.sql", "FROM coord_eidlock WHERE eid = ''), ?6,", "FROM coord_eidlock WHERE eid IN (SELECT value FROM json_each(?1))), ?6,"},
	}},
	{"epoch-kept-by-owner", "The epoch of a lease does not grow when its last owner acquires it again.", []patch{
		{"sql/sqlite/lease.sql", "epoch = lease.epoch + 1,", "epoch = lease.epoch + (lease.owner <> excluded.owner),"},
	}},
	{"attempt-ids-shared", "The ids of attempts count up from the same number in every process, so one takes another's grant for its own.", []patch{
		{"coord.go", "c.attempts.Store(int64(rand.Uint32N(1<<31-1)+1) << 32)", "c.attempts.Store(1 << 32)"},
	}},
	{"second-send-refused", "An acquisition of a mutex that database/sql sends again is refused because of its own first grant.", []patch{
		{"sql/sqlite/mutex.sql", "WHERE name = ?1 AND attempt <> ?5\n", "WHERE name = ?1\n"},
	}},
	{"undo-of-another-attempt", "An acquisition is sent under another id than the undo looks for, so what it was granted is not found.", []patch{
		{"operation.go", "a.try(sending.ctx, c.pool(), attempt)", "a.try(sending.ctx, c.pool(), c.attempts.Add(1))"},
	}},
	{"undo-ends-early", "The first answer to an undo ends it though the attempt's own reply has not come, and a grant that arrives later stays.", []patch{
		{"abandon.go", `			if end == nil && err == nil {
				if settle(); found || granted {
`, `			if err == nil {
				if settle(); found || granted || end != nil {
`},
	}},
	{"sent-after-the-caller-left", "An acquisition is sent although its caller left before, and nobody takes it back.", []patch{
		{"abandon.go", `	untie := context.AfterFunc(caller, func() {
		if !s.open() {
			cancel()
		}
	})
	s.ctx, s.stop = ctx, func() { untie(); cancel() }
`, `	s.ctx, s.stop = ctx, cancel
`},
		{"abandon.go", `	was := s.unanswered.Swap(true) // Before the look at the caller, whose end looks at this.
	if s.caller.Err() != nil {
		s.unanswered.Store(was) // database/sql may be about to send it a second time.
		return ended(s.caller)
	}
`, `	s.unanswered.Store(true)
`},
	}},
	{"late-acquisition-takes-lease", "An acquisition that arrives late takes the lease from a later one of the same owner.", []patch{
		{"sql/sqlite/lease.sql", "    AND NOT (lease.attempt >> 32 = excluded.attempt >> 32 AND lease.attempt > excluded.attempt) -- This one is late: not over a later one of its Coord.\n", ""},
	}},
	{"release-by-name", "A mutex is released by its name alone, so one that was lost releases the next holder's.", []patch{
		{"sql/sqlite/mutex.sql", "WHERE name = ?1 AND fence = ?2\nAND (expires_at > 0 OR attempt = ?3)", "WHERE name = ?1 AND ?2 > 0\nAND (expires_at > 0 OR attempt = ?3)"},
	}},
	{"caller-waits-for-driver", "The caller of an acquisition waits for the driver although its context has ended.", []patch{
		{"operation.go", "got, err := await(bound, c, func() (answer, error) {", "got, err := await(context.WithoutCancel(bound), c, func() (answer, error) {"},
	}},
	{"place-kept-after-error", "A caller that gets another error than ErrHeld keeps its place, and nobody of its process gets the mutex any more.", []patch{
		{"mutex.go", "if lock == nil { // Also if the driver panics.", "if lock == nil && errors.Is(err, ErrHeld) {"},
	}},
	{"prefix-twice", "The error of a wait has the prefix twice.", []patch{
		{"queue.go", `heldText(doing, held) + ": " + bareText(doing, failure)`, `heldText(doing, held) + ": " + failure.Error()`},
	}},

	// Guards.

	{"guard-of-any-holder", "The guard of a lease asks for any holder, so a stale one commits.", []patch{
		{"sql/sqlite/lease.sql", "AND owner = ?3 AND epoch = ?4\n", "AND ?3 > '' AND ?4 > 0\n"},
	}},
	{"guard-ignores-expiry", "The guard of a mutex lets in a holder whose row has expired, as long as nobody has taken it.", []patch{
		{"sql/sqlite/mutex.sql", `AND expires_at > coalesce(?3, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING 1;`, `AND expires_at > 0 AND coalesce(?3, 1) > 0
RETURNING 1;`},
	}},
	{"guard-from-memory", "The guard of a mutex goes by what the process believes and not by the row.", []patch{
		{"mutex.go", `	return wrap("guard "+mutexName(l.name), l.m.d.guard(ctx, tx, l.driver))
`, `	if l.err() == nil {
		return nil
	}
	return wrap("guard "+mutexName(l.name), l.m.d.guard(ctx, tx, l.driver))
`},
	}},

	// Sets of ids.

	{"set-checks-first-id", "An acquisition looks whether the first id of its set is held, and overwrites the others.", []patch{
		{"sql/sqlite/eidlock.sql", "WHERE eid IN (SELECT value FROM json_each(?1))\n    AND expires_at > coalesce(?5,", "WHERE eid = ?1 ->> 0\n    AND expires_at > coalesce(?5,"},
	}},
	{"set-ignores-anchor", "Ids that are held under another anchor of the same owner are taken, such as those of a process that has crashed.", []patch{
		{"sql/sqlite/eidlock.sql", "AND (owner <> ?2 OR anchor <> ?3\n        OR", "AND (owner <> ?2\n        OR"},
	}},
	{"narrowing-keeps-rows", "A set that is narrowed does not free the rows of the ids that it drops.", []patch{
		{"eidlock.go", "		_ = l.free(context.WithoutCancel(ctx), s.anchor, jsonList(dropped), s.fence)\n", ""},
	}},

	// Runs.

	{"hand-over-too-early", "A lease that moves is released before the work on it has returned.", []patch{
		{"runner.go", "		w.end(errHandOver)\n", "		w.end(errHandOver)\n		_, _ = r.c.leases.giveUp(r.ctx, r.cfg.Group, w.lease.Partition, r.cfg.Node, w.lease.Epoch)\n"},
	}},
	{"work-goes-on-after-loss", "The loss of a lease does not end the context of the work.", []patch{
		{"runner.go", "w.untie = context.AfterFunc(w.keeper.ctx, func() { w.end(ErrLost) })", `w.untie = context.AfterFunc(w.keeper.ctx, func() {
		select {
		case r.nudge <- struct{}{}:
		default:
		}
	})`},
	}},
	{"run-releases-by-owner", "A run releases its leases by owner, so that a release which arrives late ends a later lease of the same node.", []patch{
		{"runner.go", "r.c.leases.giveUp(ctx, r.cfg.Group, w.lease.Partition, r.cfg.Node, w.lease.Epoch)", "r.c.leases.Release(ctx, r.cfg.Group, w.lease.Partition, r.cfg.Node)"},
	}},
	{"loss-not-looked-after", "A node that has lost a lease looks for no free partition until the members change.", []patch{
		{"runner.go", "			r.short, r.changed = true, time.Now() // It may be had back.\n", "			r.changed = time.Now()\n"},
		{"runner.go", "if !r.short && time.Since(r.read) < r.cfg.TTL {", "if !r.short && !r.read.IsZero() {"},
	}},
	{"stranded-never-taken", "A partition that is dealt to a node which can't take it is taken by no other.", []patch{
		{"runner.go", "	stranded := r.stranded(owners, dealt)\n", ""},
		{"runner.go", "	if _, err := r.take(stranded, true); err != nil {\n		return err\n	}\n", ""},
	}},
	{"quit-keeps-leases", "A run that ends leaves its leases to their TTL.", []patch{
		{"runner.go", "} else if _, err := r.c.leases.giveUp(ctx, r.cfg.Group", "} else if r.ctx.Err() != nil { // They expire.\n		} else if _, err := r.c.leases.giveUp(ctx, r.cfg.Group"},
	}},
	{"quit-keeps-member", "A run that ends stays a member until the TTL, and partitions are dealt to it.", []patch{
		{"runner.go", "if r.left || !r.asked {", "if r.left || !r.asked || r.ctx.Err() != nil {"},
	}},

	// Connections and Close.

	{"turn-kept-after-failed-dial", "A failed dial for the renewals' connection keeps the turn, so renewals stop and Close hangs.", []patch{
		{"session.go", "		s.turn.give()\n		return none, err\n	}\n	ctx = context.WithoutCancel(ctx)\n", "		return none, err\n	}\n	ctx = context.WithoutCancel(ctx)\n"},
	}},
	{"abandoned-connection-kept", "A connection that was given up while the driver hung stays borrowed when the driver returns.", []patch{
		{"session.go", "func(T, error) { cancel(); s.c.terminate(conn) }", "func(T, error) { cancel() }"},
	}},
	{"close-leaves-connection", "Close does not give the renewals' connection back.", []patch{
		{"session.go", "			} else {\n				conn.giveBack()\n			}\n", "			}\n"},
	}},
	{"close-does-not-wait", "Close returns while operations and what is taken back are in flight.", []patch{
		{"coord.go", "		c.busy.Wait()\n", ""},
		{"coord.go", "		wait(ctx, &c.late)\n", ""},
	}},
	{"close-leaves-goroutines", "Goroutines that wait for statements go on after Close.", []patch{
		{"coord.go", "		close(c.crew.closed)\n", ""},
	}},

	// Reservations and Purge.

	{"confirm-resurrects", "A replayed Confirm takes a key again that its owner has released.", []patch{
		{"sql/sqlite/reservation.sql", `    ELSE NOT EXISTS (
        SELECT 1 FROM json_each(reservation.released)
        WHERE (value ->> 0, value ->> 1) = (?4, ?5) AND value ->> 2 >= ?6
    )
END
`, `    ELSE true
END
`},
	}},
	{"release-forgets-others", "The release of a key forgets when its former owners have released it, so their Confirms can be replayed.", []patch{
		{"sql/sqlite/reservation.sql", "            FROM json_each(released)\n            WHERE (value ->> 0, value ->> 1) <> (?4, ?5)\n", "            FROM json_each(released)\n            WHERE false\n"},
	}},
	{"old-release-frees", "A replayed Release frees a key that was confirmed at a later version.", []patch{
		{"sql/sqlite/reservation.sql", "AND confirmed AND version <= ?6\n", "AND confirmed\n"},
	}},
	{"expired-hold-counts", "A key whose last hold has expired is refused to other owners until it is abandoned.", []patch{
		{"sql/sqlite/reservation.sql", `OR NOT reservation.confirmed AND reservation.expires_at <= coalesce(?8, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING`, `OR NOT reservation.confirmed AND reservation.expires_at = 0
RETURNING`},
	}},
	{"confirm-over-rival", "A Confirm takes a key that is reserved by another owner.", []patch{
		{"sql/sqlite/reservation.sql", "AND (reservation.confirmed OR reservation.expires_at > coalesce(?7, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)) THEN 0", "AND (reservation.confirmed OR coalesce(?7, 0) < 0) THEN 0"},
	}},
	{"abandon-frees-other-holds", "The Abandon of a hold ends all holds of the key.", []patch{
		{"sql/sqlite/reservation.sql", `SET holds = (SELECT json_group_array(json(value)) FROM json_each(holds) WHERE value ->> 0 <> ?6),
    expires_at = (SELECT coalesce(max(value ->> 1), 0) FROM json_each(holds) WHERE value ->> 0 <> ?6) --`, `SET holds = '[]',
    expires_at = 0 --`},
	}},
	{"purge-deletes-live", "Purge goes by the last renewal of a mutex and deletes live rows.", []patch{
		{"sql/sqlite/mutex.sql", "    OR expires_at <= coalesce(?2,", "    OR dated <= coalesce(?2,"},
	}},
	{"purge-deletes-epochs", "Purge deletes leases that were released or have expired, and their epochs begin again.", []patch{
		{"lease.go", `	ddl, ok, err := load(c.dialect, c.names, "lease.sql",
`, `	var purge string
	ddl, ok, err := load(c.dialect, c.names, "lease.sql", section{"purge?", &purge},
`},
		{"lease.go", `"coord_lease", ddl, "", "", s.guard)`, `"coord_lease", ddl, purge, "", s.guard)`},
		{"sql/sqlite/lease.sql", "RETURNING 1;\n", `RETURNING 1;

-- name: purge
-- (age, now) as many rows changed as were released, or had expired longer than age ago
DELETE FROM coord_lease
WHERE expires_at = 0
OR expires_at <= coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1;
`},
	}},
}
