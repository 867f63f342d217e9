-- Mutexes, advisory mode: locks of the server's own, on the session that asks. No table.
-- A session carries a mark of its own. Where a pooler gives a statement another session, or one session to two of us,
-- the mark is not there or not ours, and nothing is locked: a session lock is re-entrant, so two would hold it at once.

-- name: identify
-- () row of (the session's mark, whether advisory locks do something)
SELECT coalesce(current_setting('coord.session', true), ''), version() NOT LIKE 'CockroachDB%';

-- name: mark
-- (mark) row of (mark), for as long as the session lasts
SELECT set_config('coord.session', $1::text, false);

-- name: exchange
-- (requests json of [key, true to lock or false to unlock], mark) rows of (place in the list, answer: whether it was
-- granted, or had been held; null in another session)
SELECT place, CASE
    WHEN current_setting('coord.session', true) IS DISTINCT FROM $2::text THEN NULL
    WHEN (value ->> 1)::boolean THEN pg_try_advisory_lock((value ->> 0)::bigint)
    ELSE pg_advisory_unlock((value ->> 0)::bigint)
END
FROM jsonb_array_elements($1::jsonb) WITH ORDINALITY AS requests (value, place);

-- name: lock_tx
-- (key) row of (whether advisory locks do something), once granted, until the transaction ends
SELECT version() NOT LIKE 'CockroachDB%', pg_advisory_xact_lock($1::bigint)::text;

-- name: try_lock_tx
-- (key) row of (whether advisory locks do something, granted), until the transaction ends
SELECT version() NOT LIKE 'CockroachDB%', pg_try_advisory_xact_lock($1::bigint);
