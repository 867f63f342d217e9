-- Leases: one row per partition of a group, kept for ever, so that its epoch only grows.
-- Times and durations are microseconds; a null "now" means the database's clock. That counts whole milliseconds, so
-- what it grants ends one later: a holder may trust its lease for the full TTL from the moment it asked.
-- A statement that may write takes the database's write lock before it reads the clock or a row.

CREATE TABLE IF NOT EXISTS coord_lease (
    group_name TEXT    NOT NULL,
    partition  INTEGER NOT NULL,
    owner      TEXT    NOT NULL,
    epoch      INTEGER NOT NULL,
    attempt    INTEGER NOT NULL, -- the last acquisition or release: the Coord in the upper half, a count in the lower
    dated      INTEGER NOT NULL, -- the "now" of the last grant or renewal: an older one that arrives late changes nothing
    expires_at INTEGER NOT NULL, -- 0 once released
    PRIMARY KEY (group_name, partition)
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_lease', 1) ON CONFLICT DO NOTHING;

-- name: acquire
-- (group, partition, owner, ttl, now, attempt) row of (granted, owner, epoch, expires); none if another holds it
INSERT INTO coord_lease AS lease (group_name, partition, owner, epoch, attempt, dated, expires_at)
SELECT ?1, ?2, ?3, 1, ?6, coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000), coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?4
WHERE true -- or SQLite takes ON for a join's
ON CONFLICT (group_name, partition) DO UPDATE
SET owner = excluded.owner,
    epoch = lease.epoch + 1,
    attempt = excluded.attempt,
    dated = excluded.dated,
    expires_at = excluded.expires_at
WHERE lease.owner = excluded.owner
    AND NOT (lease.attempt >> 32 = excluded.attempt >> 32 AND lease.attempt > excluded.attempt) -- This one is late: not over a later one of its Coord.
OR lease.expires_at <= coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING 1, owner, epoch, expires_at;

-- name: holder
-- (group, partition, owner, now) row of (owner, expires) if another has it; none if it is free or owner's
SELECT owner, expires_at
FROM coord_lease
WHERE group_name = ?1 AND partition = ?2 AND owner <> ?3
AND expires_at > coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000);

-- name: undo
-- (group, partition, owner, attempt) one row changed if that attempt had been granted
UPDATE coord_lease
SET expires_at = 0
WHERE group_name = ?1 AND partition = ?2 AND owner = ?3 AND attempt = ?4
AND expires_at > 0;

-- name: renew
-- (group, partitions json, owner, ttl, now) rows of (partition, epoch, expires, renewed); here no row is ever locked
UPDATE coord_lease
SET dated = max(dated, coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)),
    expires_at = CASE WHEN coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) < dated THEN expires_at
        ELSE coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?4 END
WHERE group_name = ?1 AND owner = ?3
AND partition IN (SELECT value FROM json_each(?2))
AND expires_at > coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING partition, epoch, expires_at, 1;

-- name: release
-- (group, partition, owner, epoch, attempt) one row changed the first time; epoch 0 is any
UPDATE coord_lease
SET attempt = ?5, expires_at = 0
WHERE group_name = ?1 AND partition = ?2 AND owner = ?3
AND (?4 = 0 OR epoch = ?4)
AND (expires_at > 0 OR attempt = ?5); -- Or sent twice, and the first was done.

-- name: owners
-- (group, now) rows of (partition, owner, epoch, expires), by partition
SELECT partition, owner, epoch, expires_at
FROM coord_lease
WHERE group_name = ?1
AND expires_at > coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
ORDER BY partition;

-- name: guard
-- (group, partition, owner, epoch, now) a row if it is still held, and then until the transaction ends
UPDATE coord_lease -- A write that changes nothing: it takes the write lock, so that nobody can take over.
SET epoch = epoch
WHERE group_name = ?1 AND partition = ?2 AND owner = ?3 AND epoch = ?4
AND expires_at > coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING 1;
