-- Mutexes, advisory mode: locks of the server's own, on the session that asks. No table.
-- A session carries a mark of its own. Where a pooler gives a statement another session, or one session to two of us,
-- the mark is not there or not ours, and nothing is locked: a session lock is re-entrant, so two would hold it at once.

-- name: identify
-- () row of (the session's mark, whether advisory locks do something)
SELECT coalesce(current_setting('coord.session', true), ''), version() NOT LIKE 'CockroachDB%';

-- name: mark
-- (mark) row of (mark), for as long as the session lasts
SELECT set_config('coord.session', $1::text, false);

-- name: lock
-- (key, mark) row of (granted, null in another session)
SELECT CASE WHEN current_setting('coord.session', true) = $2::text THEN pg_try_advisory_lock($1::bigint) END;

-- name: unlock
-- (key, mark) row of (whether it was held, null in another session)
SELECT CASE WHEN current_setting('coord.session', true) = $2::text THEN pg_advisory_unlock($1::bigint) END;

-- name: unlock_all
-- (keys json, mark) row of (whether all were held, null in another session)
SELECT bool_and(CASE WHEN current_setting('coord.session', true) = $2::text THEN pg_advisory_unlock(held.key::bigint) END)
FROM json_array_elements_text($1::json) AS held(key);

-- name: lock_tx
-- (key) row of (whether advisory locks do something), once granted, until the transaction ends
SELECT version() NOT LIKE 'CockroachDB%', pg_advisory_xact_lock($1::bigint)::text;

-- name: try_lock_tx
-- (key) row of (whether advisory locks do something, granted), until the transaction ends
SELECT version() NOT LIKE 'CockroachDB%', pg_try_advisory_xact_lock($1::bigint);
