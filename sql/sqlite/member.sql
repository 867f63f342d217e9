-- Members: one row per node of a service.
-- Times and durations are microseconds; a null "now" means the database's clock. That counts whole milliseconds, so
-- what it grants ends one later: a holder may trust its lease for the full TTL from the moment it asked.

CREATE TABLE IF NOT EXISTS coord_member (
    service    TEXT    NOT NULL,
    node       TEXT    NOT NULL,
    address    TEXT    NOT NULL,
    groups     TEXT    NOT NULL, -- a JSON list
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (service, node)
) STRICT;

INSERT INTO coord_format (table_name, format) VALUES ('coord_member', 1) ON CONFLICT DO NOTHING;

-- name: heartbeat
-- (service, node, address, groups json, ttl, now) row of (expires)
INSERT INTO coord_member (service, node, address, groups, expires_at)
VALUES (?1, ?2, ?3, ?4, coalesce(?6, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 + 1000) + ?5)
ON CONFLICT (service, node) DO UPDATE
SET address = excluded.address,
    groups = excluded.groups,
    expires_at = excluded.expires_at
RETURNING expires_at;

-- name: leave
-- (service, node)
DELETE FROM coord_member
WHERE service = ?1 AND node = ?2;

-- name: list
-- (service, now) rows of (node, address, groups json, expires), by node
SELECT node, address, groups, expires_at
FROM coord_member
WHERE service = ?1
AND expires_at > coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000)
ORDER BY node;

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as had expired longer than age ago
DELETE FROM coord_member
WHERE rowid IN (
    SELECT rowid
    FROM coord_member
    WHERE expires_at <= coalesce(?2, CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000) - ?1
    ORDER BY service, node
    LIMIT 10000
);
