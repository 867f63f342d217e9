-- Members: one row per node of a service.
-- Times and durations are microseconds; a null "now" means the database's clock.

-- Heartbeats stay HOT: what they change has no index, and a page has room for new versions.
CREATE TABLE IF NOT EXISTS coord_member (
    service    text        COLLATE "C" NOT NULL,
    node       text        COLLATE "C" NOT NULL,
    address    text        NOT NULL,
    groups     text[]      NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (service, node)
) WITH (fillfactor = 40);

INSERT INTO coord_format (table_name, format) VALUES ('coord_member', 1) ON CONFLICT DO NOTHING;

-- name: heartbeat
-- (service, node, address, groups json, ttl, now) row of (expires); none if another transaction has locked the row
WITH seen AS MATERIALIZED (
    SELECT node
    FROM coord_member
    WHERE service = $1::text AND node = $2::text
), mine AS ( -- It shares a connection with all renewals, so it waits for no row.
    SELECT node
    FROM coord_member
    WHERE service = $1::text AND node = $2::text
    FOR NO KEY UPDATE SKIP LOCKED
)
INSERT INTO coord_member AS member (service, node, address, groups, expires_at)
SELECT $1::text, $2::text, $3::text, ARRAY(SELECT jsonb_array_elements_text($4::jsonb)),
    coalesce(to_timestamp($6::bigint / 1e6), clock_timestamp()) + $5::bigint * interval '1 microsecond'
WHERE EXISTS (SELECT FROM mine)
OR NOT EXISTS (SELECT FROM seen) AND set_config('lock_timeout', '500', true) IS NOT NULL -- Bounds the wait for a rival's insert, in this transaction alone.
ON CONFLICT (service, node) DO UPDATE
SET address = excluded.address,
    groups = excluded.groups,
    expires_at = coalesce(to_timestamp($6::bigint / 1e6), clock_timestamp()) + $5::bigint * interval '1 microsecond'
RETURNING (extract(epoch FROM expires_at) * 1000000)::bigint;

-- name: leave
-- (service, node)
DELETE FROM coord_member
WHERE service = $1::text AND node = $2::text;

-- name: list
-- (service, now) rows of (node, address, groups json, expires), by node
SELECT node, address, to_json(groups)::text, (extract(epoch FROM expires_at) * 1000000)::bigint
FROM coord_member
WHERE service = $1::text
AND expires_at > coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp())
ORDER BY node;

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as had expired longer than age ago
WITH expired AS (
    SELECT service, node
    FROM coord_member
    WHERE expires_at <= coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
    ORDER BY service, node
    LIMIT 10000
    FOR UPDATE SKIP LOCKED -- A row that is in use is not stale.
)
DELETE FROM coord_member AS member
USING expired
WHERE member.service = expired.service AND member.node = expired.node;
