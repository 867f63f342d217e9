-- Mutexes, advisory mode: locks of the server's own, on the session that asks. No table.
-- Every answer names its server process: one that changes betrays a pooler between us and the server.

-- name: identify
-- () row of (pid, whether advisory locks do something)
SELECT pg_backend_pid(), version() NOT LIKE 'CockroachDB%';

-- name: lock
-- (key) row of (pid, granted)
SELECT pg_backend_pid(), pg_try_advisory_lock($1::bigint);

-- name: unlock
-- (key) row of (pid, whether it was held)
SELECT pg_backend_pid(), pg_advisory_unlock($1::bigint);

-- name: lock_tx
-- (key) row of (whether advisory locks do something), once granted, until the transaction ends
SELECT version() NOT LIKE 'CockroachDB%', pg_advisory_xact_lock($1::bigint)::text;

-- name: try_lock_tx
-- (key) row of (whether advisory locks do something, granted), until the transaction ends
SELECT version() NOT LIKE 'CockroachDB%', pg_try_advisory_xact_lock($1::bigint);
