-- Mutexes, table mode: one row per name, kept on release until Purge.
-- Times and durations are microseconds; a null "now" means the database's clock.

-- Tokens outlive their rows: a name that was purged goes on with larger ones.
CREATE SEQUENCE IF NOT EXISTS coord_mutex_fence;

-- Renewals stay HOT: what they change has no index, and a page has room for new versions.
CREATE TABLE IF NOT EXISTS coord_mutex (
    name       text        COLLATE "C" PRIMARY KEY,
    owner      text        NOT NULL,
    fence      bigint      NOT NULL, -- 0 until it is first acquired
    attempt    bigint      NOT NULL, -- the acquisition that drew this token, or the release
    dated      timestamptz NOT NULL, -- the "now" of the last grant or renewal: an older one that arrives late changes nothing
    expires_at timestamptz NOT NULL  -- 'epoch' once released
) WITH (fillfactor = 40);

INSERT INTO coord_format (table_name, format) VALUES ('coord_mutex', 1) ON CONFLICT DO NOTHING;

-- name: acquire
-- (name, owner, ttl, now, attempt) row of (granted, owner, fence, expires); none if a rival was faster, or another
-- transaction has locked the row: it is never waited for; a grant with token 0 has made the row and is to be sent again
WITH seen AS MATERIALIZED (
    SELECT owner, fence, attempt, expires_at
    FROM coord_mutex
    WHERE name = $1::text
), held AS ( -- Look first: a refused attempt writes nothing.
    SELECT owner, fence, expires_at
    FROM seen
    WHERE attempt <> $5::bigint
    AND expires_at > coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp())
), made AS (
    INSERT INTO coord_mutex (name, owner, fence, attempt, dated, expires_at)
    -- A free row and no token: one drawn before the row is owned could be overtaken by a rival's, and land after it.
    SELECT $1::text, '', 0, 0, 'epoch', 'epoch'
    WHERE NOT EXISTS (SELECT FROM seen)
    AND set_config('lock_timeout', '500', true) IS NOT NULL -- Bounds the wait for a rival's insert, in this transaction alone.
    ON CONFLICT (name) DO NOTHING
    RETURNING name
), mine AS ( -- Judged again once it is owned. The full lock, which no row under an open guard gives.
    SELECT name
    FROM coord_mutex
    WHERE name = $1::text
    AND EXISTS (SELECT FROM seen) AND NOT EXISTS (SELECT FROM held)
    AND (attempt = $5::bigint -- Sent twice by the driver, and the first was granted.
        OR expires_at <= coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()))
    FOR UPDATE SKIP LOCKED
), won AS (
    UPDATE coord_mutex AS mutex
    SET owner = $2::text,
        fence = nextval('"coord_mutex_fence"'), -- Drawn when the row is owned.
        attempt = $5::bigint,
        dated = coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()),
        expires_at = coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()) + $3::bigint * interval '1 microsecond'
    FROM mine
    WHERE mutex.name = mine.name
    RETURNING mutex.owner, mutex.fence, mutex.expires_at
)
SELECT true, owner, fence, (extract(epoch FROM expires_at) * 1000000)::bigint FROM won
UNION ALL
SELECT true, '', 0, 0 FROM made
UNION ALL
SELECT false, owner, fence, (extract(epoch FROM expires_at) * 1000000)::bigint FROM held;

-- name: holder
-- (name, now) row of (owner, expires); none if it is free
SELECT owner, (extract(epoch FROM expires_at) * 1000000)::bigint
FROM coord_mutex
WHERE name = $1::text
AND expires_at > coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp());

-- name: undo
-- (name, attempt) one row changed if that attempt had been granted
UPDATE coord_mutex
SET expires_at = 'epoch'
WHERE name = $1::text AND attempt = $2::bigint
AND expires_at > 'epoch';

-- name: extend
-- (name, fence, ttl, now) one row changed if it still carries the token
UPDATE coord_mutex -- No need to lock first: expiry is not judged, and a TTL that counts from before a wait is only shorter.
SET dated = greatest(dated, coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp())),
    expires_at = CASE WHEN coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()) < dated THEN expires_at
        ELSE coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()) + $3::bigint * interval '1 microsecond' END
WHERE name = $1::text AND fence = $2::bigint
AND expires_at > 'epoch';

-- name: renew
-- (locks json of [name, fence, ttl], now) rows of (name, fence, renewed) of those that still carry the token; not
-- renewed: another transaction has locked the row, and the next renewal will tell
WITH asked AS MATERIALIZED (
    SELECT value ->> 0 AS name, (value ->> 1)::bigint AS fence, (value ->> 2)::bigint AS ttl
    FROM jsonb_array_elements($1::jsonb)
), mine AS MATERIALIZED (
    SELECT name, fence
    FROM coord_mutex
    WHERE name = ANY (ARRAY(SELECT name FROM asked))
    AND ((name, fence) IN (SELECT name, fence FROM asked)) IS TRUE -- IS TRUE: a hash table, never a join.
    AND expires_at > 'epoch'
    ORDER BY name -- In key order: two renewals never wait for each other crosswise.
    FOR NO KEY UPDATE SKIP LOCKED -- One row that is locked does not hold up the others.
), judged AS ( -- Counting them makes now the moment when all are locked.
    SELECT coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) AS now, count(*) AS locked FROM mine
), renewed AS (
    UPDATE coord_mutex AS mutex
    SET dated = greatest(mutex.dated, judged.now),
        expires_at = CASE WHEN judged.now < mutex.dated THEN mutex.expires_at ELSE judged.now + asked.ttl * interval '1 microsecond' END
    FROM judged, mine JOIN asked USING (name, fence)
    WHERE mutex.name = mine.name
    RETURNING mutex.name, mutex.fence
)
SELECT name, fence, true FROM renewed
UNION ALL
SELECT name, fence, false
FROM coord_mutex
WHERE (SELECT locked FROM judged) < (SELECT count(*) FROM asked) -- Read only if some rows could not be locked.
AND name = ANY (ARRAY(SELECT name FROM asked))
AND ((name, fence) IN (SELECT name, fence FROM asked)) IS TRUE
AND expires_at > 'epoch'
AND (name IN (SELECT name FROM mine)) IS NOT TRUE;

-- name: release
-- (name, fence, attempt) one row changed if it still carried the token
UPDATE coord_mutex
SET attempt = $3::bigint, expires_at = 'epoch'
WHERE name = $1::text AND fence = $2::bigint
AND (expires_at > 'epoch' OR attempt = $3::bigint); -- Or sent twice, and the first was done.

-- name: guard
-- (name, fence, now) a row if it is still held, and then until the transaction ends
WITH guarded AS ( -- KEY SHARE: a takeover, which names the key, waits for it; a renewal or a release does not.
    SELECT expires_at
    FROM coord_mutex
    WHERE name = $1::text AND fence = $2::bigint
    FOR KEY SHARE
)
SELECT true
FROM guarded
WHERE expires_at > coalesce(to_timestamp($3::bigint / 1e6), clock_timestamp());

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as were released, or had expired longer than age ago
WITH expired AS (
    SELECT name
    FROM coord_mutex
    WHERE expires_at = 'epoch'
    OR expires_at <= coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
    ORDER BY name
    LIMIT 10000
    FOR UPDATE SKIP LOCKED -- A row that is in use is not stale.
)
DELETE FROM coord_mutex AS mutex
USING expired
WHERE mutex.name = expired.name;
