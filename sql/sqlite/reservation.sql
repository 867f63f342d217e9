-- Reservations of one type: one row per key, kept when the key is freed, until Purge.
-- A key is taken while it is confirmed or expires_at > now. Each hold has an expiry of its own.
-- Times and durations are microseconds; a null "now" means the database's clock. That counts whole milliseconds, so
-- what it grants ends one later: a holder may trust its hold for the full TTL from the moment it asked.
-- A statement that may write takes the database's write lock before it reads the clock or a row.

CREATE TABLE IF NOT EXISTS coord_reservation__context__aggregate (
    tenant       TEXT    NOT NULL,
    namespace    TEXT    NOT NULL,
    key          TEXT    NOT NULL,
    owner_tenant TEXT    NOT NULL, -- of a key that is free: the last owner
    owner_id     TEXT    NOT NULL,
    confirmed    INTEGER NOT NULL,
    version      INTEGER NOT NULL, -- that it is confirmed at, else 0
    holds        TEXT    NOT NULL, -- a JSON list of [hold, expires, attempt]: the Reserve that added it, 0 once a second one has found it there
    expires_at   INTEGER NOT NULL, -- the last expiry of the holds; 0 without holds
    released     TEXT    NOT NULL, -- a JSON list of [owner's tenant, its id, version, at]: the last release of each owner
    PRIMARY KEY (tenant, namespace, key)
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_reservation__context__aggregate', 1) ON CONFLICT DO NOTHING;

-- name: reserve
-- (tenant, namespace, key, owner's tenant, owner's id, hold, ttl, now, attempt, bounded: it waits half a second at most)
-- row of (granted, owner's tenant, owner's id, confirmed, version, holds json, expires); none if another has it
INSERT INTO coord_reservation__context__aggregate AS reservation
    (tenant, namespace, key, owner_tenant, owner_id, confirmed, version, holds, expires_at, released)
SELECT ?1, ?2, ?3, ?4, ?5, 0, 0, json_array(json_array(?6, fresh.expires, ?9)), fresh.expires, '[]'
FROM (
    SELECT coalesce(?8, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?7 AS expires
) AS fresh
WHERE ?10 IS NOT NULL -- Without a WHERE, SQLite takes ON for a join's.
ON CONFLICT (tenant, namespace, key) DO UPDATE
SET owner_tenant = excluded.owner_tenant,
    owner_id = excluded.owner_id,
    holds = (
        SELECT json_group_array(json_array(hold, expires, attempt))
        FROM (
            SELECT value ->> 0 AS hold, value ->> 1 AS expires, value ->> 2 AS attempt
            FROM json_each(reservation.holds)
            WHERE value ->> 0 <> ?6 AND value ->> 1 > coalesce(?8, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
            AND (reservation.owner_tenant, reservation.owner_id) = (?4, ?5)
            UNION ALL
            SELECT ?6, max(excluded.expires_at, coalesce(max(value ->> 1), 0)), -- Never shortened.
                -- A hold that was there is nobody's to undo: either of the two may have been told that it has it.
                CASE WHEN max(value ->> 2) <> ?9 THEN 0 ELSE ?9 END
            FROM json_each(reservation.holds)
            WHERE value ->> 0 = ?6 AND value ->> 1 > coalesce(?8, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
            AND (reservation.owner_tenant, reservation.owner_id) = (?4, ?5)
        )
    ),
    expires_at = CASE
        WHEN (reservation.owner_tenant, reservation.owner_id) = (?4, ?5) THEN max(reservation.expires_at, excluded.expires_at)
        ELSE excluded.expires_at
    END
WHERE (reservation.owner_tenant, reservation.owner_id) = (?4, ?5)
OR NOT reservation.confirmed AND reservation.expires_at <= coalesce(?8, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
RETURNING 1, owner_tenant, owner_id, confirmed, version, (SELECT json_group_array(value ->> 0) FROM json_each(holds)), expires_at;

-- name: undo
-- (tenant, namespace, key, attempt) one row changed if that attempt had added a hold
UPDATE coord_reservation__context__aggregate
SET holds = (SELECT json_group_array(json(value)) FROM json_each(holds) WHERE value ->> 2 <> ?4),
    expires_at = (SELECT coalesce(max(value ->> 1), 0) FROM json_each(holds) WHERE value ->> 2 <> ?4)
WHERE tenant = ?1 AND namespace = ?2 AND key = ?3
AND ?4 IN (SELECT value ->> 2 FROM json_each(holds));

-- name: confirm
-- (tenant, namespace, key, owner's tenant, owner's id, version, now) row of (1), confirmed now; none if it is refused
INSERT INTO coord_reservation__context__aggregate AS reservation
    (tenant, namespace, key, owner_tenant, owner_id, confirmed, version, holds, expires_at, released)
VALUES (?1, ?2, ?3, ?4, ?5, 1, ?6, '[]', 0, '[]')
ON CONFLICT (tenant, namespace, key) DO UPDATE
SET owner_tenant = excluded.owner_tenant,
    owner_id = excluded.owner_id,
    confirmed = 1,
    version = excluded.version,
    holds = '[]',
    expires_at = 0
WHERE CASE
    WHEN (reservation.owner_tenant, reservation.owner_id) <> (?4, ?5)
        AND (reservation.confirmed OR reservation.expires_at > coalesce(?7, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)) THEN 0
    WHEN reservation.confirmed THEN reservation.version < ?6
    ELSE NOT EXISTS (
        SELECT 1 FROM json_each(reservation.released)
        WHERE (value ->> 0, value ->> 1) = (?4, ?5) AND value ->> 2 >= ?6
    )
END
RETURNING 1;

-- name: refusal
-- (tenant, namespace, key, owner's tenant, owner's id, version, now) row of (2 confirmed before, 3 stale, 4 taken by another; 0 for none of them), or none
SELECT CASE
    WHEN (owner_tenant, owner_id) <> (?4, ?5)
        AND (confirmed OR expires_at > coalesce(?7, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)) THEN 4
    WHEN confirmed AND version >= ?6 THEN 2
    WHEN EXISTS (
        SELECT 1 FROM json_each(released)
        WHERE (value ->> 0, value ->> 1) = (?4, ?5) AND value ->> 2 >= ?6
    ) THEN 3
    ELSE 0
END
FROM coord_reservation__context__aggregate
WHERE tenant = ?1 AND namespace = ?2 AND key = ?3;

-- name: abandon
-- (tenant, namespace, key, owner's tenant, owner's id, hold) a row if the hold was there
UPDATE coord_reservation__context__aggregate
SET holds = (SELECT json_group_array(json(value)) FROM json_each(holds) WHERE value ->> 0 <> ?6),
    expires_at = (SELECT coalesce(max(value ->> 1), 0) FROM json_each(holds) WHERE value ->> 0 <> ?6) -- Without a hold it is free, unless it is confirmed.
WHERE tenant = ?1 AND namespace = ?2 AND key = ?3
AND (owner_tenant, owner_id) = (?4, ?5)
AND ?6 IN (SELECT value ->> 0 FROM json_each(holds))
RETURNING 1;

-- name: release
-- (tenant, namespace, key, owner's tenant, owner's id, version, now) a row if it was confirmed, and not later than at that version
UPDATE coord_reservation__context__aggregate
SET confirmed = 0,
    version = 0,
    holds = (
        SELECT json_group_array(json(value)) FROM json_each(holds)
        WHERE value ->> 1 > coalesce(?7, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
    ),
    expires_at = (
        SELECT coalesce(max(value ->> 1), 0) FROM json_each(holds)
        WHERE value ->> 1 > coalesce(?7, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
    ),
    released = ( -- Remembered whoever has the key next, or a Confirm from before could resurrect it.
        SELECT json_group_array(json_array(tenant, id, version, at))
        FROM (
            SELECT value ->> 0 AS tenant, value ->> 1 AS id, value ->> 2 AS version, value ->> 3 AS at
            FROM json_each(released)
            WHERE (value ->> 0, value ->> 1) <> (?4, ?5)
            UNION ALL
            SELECT ?4, ?5, ?6, coalesce(?7, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
        )
    )
WHERE tenant = ?1 AND namespace = ?2 AND key = ?3
AND (owner_tenant, owner_id) = (?4, ?5)
AND confirmed AND version <= ?6
RETURNING 1;

-- name: find
-- (tenant, namespace, key, now) row of (owner's tenant, owner's id, confirmed, version, live holds json, expires or 0), or none
SELECT owner_tenant, owner_id, confirmed, version, (
        SELECT json_group_array(value ->> 0) FROM json_each(holds)
        WHERE value ->> 1 > coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
    ), (
        SELECT coalesce(max(value ->> 1), 0) FROM json_each(holds)
        WHERE value ->> 1 > coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
    )
FROM coord_reservation__context__aggregate
WHERE tenant = ?1 AND namespace = ?2 AND key = ?3
AND (confirmed OR expires_at > coalesce(?4, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000));

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as had been free, or had expired, and not been released since longer than age ago
DELETE FROM coord_reservation__context__aggregate
WHERE rowid IN (
    SELECT rowid
    FROM coord_reservation__context__aggregate
    WHERE NOT confirmed
    AND expires_at <= coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1
    AND NOT EXISTS (
        SELECT 1 FROM json_each(released)
        WHERE value ->> 3 > coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1
    )
    ORDER BY tenant, namespace, key
    LIMIT 10000
);

-- name: trim
-- (age, now) forgets releases from longer than age ago of up to 10000 keys that stay: a row must not grow for ever
UPDATE coord_reservation__context__aggregate
SET released = (
    SELECT json_group_array(json(value)) FROM json_each(released)
    WHERE value ->> 3 > coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1
)
WHERE rowid IN (
    SELECT rowid
    FROM coord_reservation__context__aggregate
    WHERE EXISTS (
        SELECT 1 FROM json_each(released)
        WHERE value ->> 3 <= coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1
    )
    ORDER BY tenant, namespace, key
    LIMIT 10000
);
