-- Locks on sets of ids: one row per id, kept on release until Purge. All rows of a set carry its token.
-- Times and durations are microseconds; a null "now" means the database's clock. That counts whole milliseconds, so
-- what it grants ends one later: a holder may trust its locks for the full TTL from the moment it asked.
-- A statement that may write takes the database's write lock before it reads the clock or a row.

CREATE TABLE IF NOT EXISTS coord_eidlock (
    eid        TEXT    NOT NULL PRIMARY KEY, -- '' keeps the last token, so that those of ids that were purged only grow
    owner      TEXT    NOT NULL,
    anchor     TEXT    NOT NULL,
    fence      INTEGER NOT NULL,
    attempt    INTEGER NOT NULL, -- the acquisition that drew this token: the Coord in the upper half, a count in the lower
    dated      INTEGER NOT NULL, -- the "now" of the last grant or renewal: an older one that arrives late changes nothing
    expires_at INTEGER NOT NULL  -- 0 once released
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_eidlock', 1) ON CONFLICT DO NOTHING;

-- name: acquire
-- (eids json, owner, anchor, ttl, now, attempt) rows of (granted, fence, eid, owner, expires); none if one is held
INSERT INTO coord_eidlock AS lock (eid, owner, anchor, fence, attempt, dated, expires_at)
SELECT value, ?2, ?3, (SELECT coalesce(max(fence), 0) + 1 FROM coord_eidlock WHERE eid = ''), ?6, coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    CASE value WHEN '' THEN 0 ELSE coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?4 END
FROM (SELECT value FROM json_each(?1) UNION ALL SELECT '')
WHERE NOT EXISTS (
    SELECT 1
    FROM coord_eidlock
    WHERE eid IN (SELECT value FROM json_each(?1))
    AND expires_at > coalesce(?5, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
    AND (owner <> ?2 OR anchor <> ?3
        OR attempt >> 32 = ?6 >> 32 AND attempt > ?6) -- This one is late: not over a later one of its Coord.
)
ON CONFLICT (eid) DO UPDATE
SET owner = excluded.owner,
    anchor = excluded.anchor,
    fence = excluded.fence,
    attempt = excluded.attempt,
    dated = excluded.dated,
    expires_at = excluded.expires_at
RETURNING 1, fence, eid, owner, expires_at;

-- name: holder
-- (eids json, owner, anchor, now) row of (eid, owner, expires) of one that another has; none if they are free
SELECT eid, owner, expires_at
FROM coord_eidlock
WHERE eid IN (SELECT value FROM json_each(?1))
AND (owner <> ?2 OR anchor <> ?3)
AND expires_at > coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
ORDER BY eid
LIMIT 1;

-- name: undo
-- (eids json, attempt) the rows changed that this attempt had been granted
UPDATE coord_eidlock
SET expires_at = 0
WHERE eid IN (SELECT value FROM json_each(?1)) AND attempt = ?2
AND expires_at > 0;

-- name: renew
-- (sets json of [fence, ttl, eids], now) rows of (fence, eid, renewed), one for each id of each set that is still
-- whole: all of its rows carry the token, and none has expired. No row: the set is lost; here no row is ever locked
WITH sets AS MATERIALIZED ( -- Else each id would parse the whole list again.
    SELECT key AS place, value ->> 0 AS fence, value ->> 1 AS ttl, value -> 2 AS eids, json_array_length(value, '$[2]') AS size
    FROM json_each(?1)
), asked AS MATERIALIZED (
    SELECT place, fence, ttl, size, id.value AS eid
    FROM sets, json_each(eids) AS id
), whole AS MATERIALIZED ( -- By id and token: an id that one set has lost may be held by another.
    SELECT place
    FROM asked CROSS JOIN coord_eidlock USING (eid, fence) -- In this order: the table is the one with an index.
    WHERE expires_at > coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
    GROUP BY place
    HAVING count(*) = size
)
UPDATE coord_eidlock
SET dated = max(dated, coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)),
    expires_at = CASE WHEN coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) < dated THEN expires_at
        ELSE coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + mine.ttl END
FROM (SELECT eid, ttl FROM asked WHERE place IN whole) AS mine
WHERE coord_eidlock.eid = mine.eid
RETURNING fence, eid, 1;

-- name: release
-- (eids json, fence) the rows changed that still carried the token
UPDATE coord_eidlock
SET expires_at = 0
WHERE eid IN (SELECT value FROM json_each(?1)) AND fence = ?2
AND expires_at > 0;

-- name: check
-- (eids json, fence, now) a row if all of them are held
SELECT 1
WHERE (
    SELECT count(*)
    FROM coord_eidlock
    WHERE eid IN (SELECT value FROM json_each(?1)) AND fence = ?2
    AND expires_at > coalesce(?3, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
) = json_array_length(?1);

-- name: guard
-- (eids json, fence, now) a row if all of them are held, and then until the transaction ends
UPDATE coord_eidlock -- A write that changes nothing: it takes the write lock, so that nobody can take over.
SET fence = fence
WHERE eid = ''
AND (
    SELECT count(*)
    FROM coord_eidlock
    WHERE eid IN (SELECT value FROM json_each(?1)) AND fence = ?2
    AND expires_at > coalesce(?3, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
) = json_array_length(?1)
RETURNING 1;

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as were released, or had expired longer than age ago
DELETE FROM coord_eidlock
WHERE rowid IN (
    SELECT rowid
    FROM coord_eidlock
    WHERE eid <> ''
    AND (expires_at = 0 OR expires_at <= coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1)
    ORDER BY eid
    LIMIT 10000
);
