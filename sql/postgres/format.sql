-- Formats: which of coord's tables are here, and in which format each is.

-- Serialises DDL: CREATE TABLE IF NOT EXISTS fails with 23505 or 42710 when many sessions run it at once.
-- Sent as one message with what follows, so that the lock is held until all of it is committed.
SELECT pg_advisory_xact_lock(4856710386124705089);

CREATE TABLE IF NOT EXISTS coord_format (
    table_name text   COLLATE "C" PRIMARY KEY,
    format     bigint NOT NULL
);

INSERT INTO coord_format (table_name, format) VALUES ('coord_format', 1) ON CONFLICT DO NOTHING;

-- name: where
-- (schema, table) row of (the schema that has the table, '' if none; the schema where it would be made)
SELECT coalesce((SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = named.table), ''),
    CASE WHEN $1::text = '' THEN coalesce(quote_ident(current_schema()), '') ELSE quote_ident($1::text) END
FROM (
    SELECT to_regclass(CASE WHEN $1::text = '' THEN '' ELSE quote_ident($1::text) || '.' END || quote_ident($2::text)) AS table
) AS named;

-- name: formats
-- () rows of (table, format)
SELECT table_name, format
FROM coord_format;

-- name: terminate
-- () ends this session, and with it all that it holds: a pool of the driver's own may keep a connection that was closed
SELECT pg_terminate_backend(pg_backend_pid());
