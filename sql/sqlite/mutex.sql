-- Mutexes, table mode: one row per name, kept on release until Purge.
-- Times and durations are microseconds; a null "now" means the database's clock. That counts whole milliseconds, so
-- what it grants ends one later: a holder may trust its lock for the full TTL from the moment it asked.
-- A statement that may write takes the database's write lock before it reads the clock or a row.

-- Tokens outlive their rows: AUTOINCREMENT never gives a number twice.
CREATE TABLE IF NOT EXISTS coord_mutex (
    fence      INTEGER PRIMARY KEY AUTOINCREMENT,
    name       TEXT    NOT NULL UNIQUE,
    owner      TEXT    NOT NULL,
    attempt    INTEGER NOT NULL, -- the acquisition that drew this token, or the release
    dated      INTEGER NOT NULL, -- the "now" of the last grant or renewal: an older one that arrives late changes nothing
    expires_at INTEGER NOT NULL  -- 0 once released
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_mutex', 1) ON CONFLICT DO NOTHING;

-- name: acquire
-- (name, owner, ttl, now, attempt) row of (granted, owner, fence, expires); none if another holds it
INSERT OR REPLACE INTO coord_mutex (name, owner, attempt, dated, expires_at) -- The row in place of a former one draws a new token.
SELECT ?1, ?2, ?5, coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000), coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?3
WHERE NOT EXISTS (
    SELECT 1
    FROM coord_mutex
    WHERE name = ?1 AND attempt <> ?5
    AND expires_at > coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
)
RETURNING 1, owner, fence, expires_at;

-- name: holder
-- (name, now) row of (owner, expires); none if it is free
SELECT owner, expires_at
FROM coord_mutex
WHERE name = ?1
AND expires_at > coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000);

-- name: undo
-- (name, attempt) one row changed if that attempt had been granted
UPDATE coord_mutex
SET expires_at = 0
WHERE name = ?1 AND attempt = ?2
AND expires_at > 0;

-- name: extend
-- (name, fence, ttl, now) one row changed if it still carries the token
UPDATE coord_mutex
SET dated = max(dated, coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)),
    expires_at = CASE WHEN coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) < dated THEN expires_at
        ELSE coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?3 END
WHERE name = ?1 AND fence = ?2
AND expires_at > 0;

-- name: renew
-- (locks json of [name, fence, ttl], now) rows of (name, fence, renewed) of those that still carry the token; here no
-- row is ever locked
UPDATE coord_mutex
SET dated = max(dated, coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)),
    expires_at = CASE WHEN coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) < dated THEN expires_at
        ELSE coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + asked.ttl END
FROM (SELECT value ->> 0 AS name, value ->> 1 AS fence, value ->> 2 AS ttl FROM json_each(?1)) AS asked
WHERE coord_mutex.name = asked.name AND coord_mutex.fence = asked.fence
AND expires_at > 0
RETURNING name, fence, 1;

-- name: release
-- (name, fence, attempt) one row changed if it still carried the token
UPDATE coord_mutex
SET attempt = ?3, expires_at = 0
WHERE name = ?1 AND fence = ?2
AND (expires_at > 0 OR attempt = ?3); -- Or sent twice, and the first was done.

-- name: guard
-- (name, fence, now) a row if it is still held, and then until the transaction ends
UPDATE coord_mutex -- A write that changes nothing: it takes the write lock, so that nobody can take over.
SET owner = owner
WHERE name = ?1 AND fence = ?2
AND expires_at > coalesce(?3, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING 1;

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as were released, or had expired longer than age ago
DELETE FROM coord_mutex
WHERE rowid IN (
    SELECT rowid
    FROM coord_mutex
    WHERE expires_at = 0
    OR expires_at <= coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1
    ORDER BY name
    LIMIT 10000
);
