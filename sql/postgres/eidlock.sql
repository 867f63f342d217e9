-- Locks on sets of ids: one row per id, kept on release until Purge. All rows of a set carry its token.
-- Times and durations are microseconds; a null "now" means the database's clock.

-- Tokens outlive their rows: an id that was purged goes on with larger ones.
CREATE SEQUENCE IF NOT EXISTS coord_eidlock_fence;

-- Renewals stay HOT: what they change has no index, and a page has room for new versions.
CREATE TABLE IF NOT EXISTS coord_eidlock (
    eid        text        COLLATE "C" PRIMARY KEY,
    owner      text        NOT NULL,
    anchor     text        NOT NULL,
    fence      bigint      NOT NULL, -- 0 until it is first acquired
    attempt    bigint      NOT NULL, -- the acquisition that drew this token: the Coord in the upper half, a count in the lower
    dated      timestamptz NOT NULL, -- the "now" of the last grant or renewal: an older one that arrives late changes nothing
    expires_at timestamptz NOT NULL  -- 'epoch' once released
) WITH (fillfactor = 40);

INSERT INTO coord_format (table_name, format) VALUES ('coord_eidlock', 1) ON CONFLICT DO NOTHING;

-- name: acquire
-- (eids json, owner, anchor, ttl, now, attempt) row of (granted, fence, eid, owner, expires), one that is held if not
-- granted; none if a rival was faster, or has one in an open transaction; a grant with token 0 has made rows and is to
-- be sent again
WITH seen AS MATERIALIZED (
    SELECT eid, owner, anchor, expires_at
    FROM coord_eidlock
    WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
), held AS ( -- Look first: a refused attempt writes nothing.
    SELECT eid, owner, expires_at
    FROM seen
    WHERE (owner <> $2::text OR anchor <> $3::text)
    AND expires_at > coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp())
    ORDER BY eid
    LIMIT 1
), made AS (
    INSERT INTO coord_eidlock (eid, owner, anchor, fence, attempt, dated, expires_at)
    -- Free rows and no token: one drawn before a row is owned could be overtaken by a rival's, and land after it.
    SELECT value, '', '', 0, 0, 'epoch', 'epoch'
    FROM jsonb_array_elements_text($1::jsonb)
    WHERE NOT EXISTS (SELECT FROM held)
    AND set_config('lock_timeout', '500', true) IS NOT NULL -- Bounds the wait for a rival's insert, in this transaction alone.
    AND (SELECT count(*) FROM seen) < jsonb_array_length($1::jsonb)
    AND NOT EXISTS (SELECT FROM seen WHERE seen.eid = value)
    ORDER BY value COLLATE "C"
    ON CONFLICT (eid) DO NOTHING
    RETURNING eid
), mine AS ( -- Every row is owned before any is changed, so nothing has to be undone.
    SELECT expires_at <= coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp())
        OR owner = $2::text AND anchor = $3::text
        AND NOT (attempt >> 32 = $6::bigint >> 32 AND attempt > $6::bigint) AS free -- This one is late: not over a later one of its Coord.
    FROM coord_eidlock
    WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
    AND NOT EXISTS (SELECT FROM held)
    AND (SELECT count(*) FROM seen) = jsonb_array_length($1::jsonb)
    ORDER BY eid
    FOR UPDATE SKIP LOCKED -- The full lock, which no row under an open guard gives. To wait for one would keep others waiting for the rest.
), judged AS ( -- The aggregates are not ready before every row is locked, and now and the token come after them.
    SELECT coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()) AS now,
        CASE WHEN bool_and(free) AND count(*) = jsonb_array_length($1::jsonb) THEN nextval('"coord_eidlock_fence"') END AS fence
    FROM mine
), won AS (
    UPDATE coord_eidlock AS lock
    SET owner = $2::text,
        anchor = $3::text,
        fence = judged.fence,
        attempt = $6::bigint,
        dated = judged.now,
        expires_at = judged.now + $4::bigint * interval '1 microsecond'
    FROM judged
    WHERE lock.eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
    AND judged.fence IS NOT NULL
    RETURNING lock.eid
)
SELECT true, fence, '', $2::text, (extract(epoch FROM now) * 1000000)::bigint + $4::bigint
FROM judged
WHERE EXISTS (SELECT FROM won)
UNION ALL
SELECT true, 0, '', '', 0
WHERE EXISTS (SELECT FROM made)
UNION ALL
SELECT false, 0, eid, owner, (extract(epoch FROM expires_at) * 1000000)::bigint FROM held;

-- name: holder
-- (eids json, owner, anchor, now) row of (eid, owner, expires) of one that another has; none if they are free
SELECT eid, owner, (extract(epoch FROM expires_at) * 1000000)::bigint
FROM coord_eidlock
WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
AND (owner <> $2::text OR anchor <> $3::text)
AND expires_at > coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp())
ORDER BY eid
LIMIT 1;

-- name: undo
-- (eids json, attempt) the rows changed that this attempt had been granted
WITH mine AS (
    SELECT eid
    FROM coord_eidlock
    WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
    AND attempt = $2::bigint
    AND expires_at > 'epoch'
    ORDER BY eid
    FOR NO KEY UPDATE
)
UPDATE coord_eidlock AS lock
SET expires_at = 'epoch'
FROM mine
WHERE lock.eid = mine.eid;

-- name: renew
-- (sets json of [fence, ttl, eids], now) rows of (fence, eid, renewed), one for each set that is still whole, by its
-- token and its first eid: all of its rows carry the token, and none has expired. Not renewed: another transaction has
-- locked one of the rows, and the next renewal will tell. No row: the set is lost
WITH sets AS MATERIALIZED (
    SELECT place, (value ->> 0)::bigint AS fence, (value ->> 1)::double precision AS ttl, value -> 2 AS eids
    FROM jsonb_array_elements($1::jsonb) WITH ORDINALITY AS sets (value, place)
), asked AS MATERIALIZED (
    SELECT place, fence, eid
    FROM sets, jsonb_array_elements_text(eids) AS eid
), mine AS MATERIALIZED ( -- Lock first: an UPDATE alone would judge expiry before it waits for the row.
    SELECT eid, fence, expires_at
    FROM coord_eidlock
    WHERE eid = ANY (ARRAY(SELECT eid FROM asked))
    AND ((eid, fence) IN (SELECT eid, fence FROM asked)) IS TRUE -- IS TRUE: a hash table, never a join.
    ORDER BY eid -- In key order: two renewals never wait for each other crosswise.
    FOR NO KEY UPDATE SKIP LOCKED -- A row that is locked does not hold up the other sets.
), judged AS ( -- Counting them makes now the moment when all are locked.
    SELECT coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) AS now, count(*) AS locked FROM mine
), before AS MATERIALIZED ( -- As they were when the statement began. Read only if some rows could not be locked.
    SELECT eid, fence, expires_at
    FROM coord_eidlock
    WHERE (SELECT locked FROM judged) < (SELECT count(*) FROM asked)
    AND eid = ANY (ARRAY(SELECT eid FROM asked))
), known AS ( -- By sorting: an anti-join, planned for few rows, would compare each with each.
    SELECT DISTINCT ON (eid) eid, fence, expires_at, owned
    FROM (
        SELECT eid, fence, expires_at, true AS owned FROM mine
        UNION ALL
        SELECT eid, fence, expires_at, false FROM before
    ) AS found
    ORDER BY eid, owned DESC
), counted AS MATERIALIZED ( -- By id and token: an id that one set has lost may be held by another.
    SELECT place, count(*) AS size, min(expires_at) AS ends, bool_and(owned) AS owned
    FROM asked JOIN known USING (eid, fence)
    GROUP BY place
), whole AS MATERIALIZED (
    SELECT place, sets.fence, eids ->> 0 AS eid, ttl, owned
    FROM judged, counted JOIN sets USING (place)
    WHERE size = jsonb_array_length(eids) AND ends > judged.now
), renewed AS (
    UPDATE coord_eidlock AS lock
    SET dated = greatest(lock.dated, judged.now),
        expires_at = CASE WHEN judged.now < lock.dated THEN lock.expires_at ELSE judged.now + whole.ttl * interval '1 microsecond' END
    FROM judged, asked JOIN whole USING (place)
    WHERE lock.eid = asked.eid AND whole.owned
)
SELECT fence, eid, owned FROM whole;

-- name: release
-- (eids json, fence) the rows changed that still carried the token
WITH mine AS (
    SELECT eid
    FROM coord_eidlock
    WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
    AND fence = $2::bigint
    AND expires_at > 'epoch'
    ORDER BY eid
    FOR NO KEY UPDATE
)
UPDATE coord_eidlock AS lock
SET expires_at = 'epoch'
FROM mine
WHERE lock.eid = mine.eid;

-- name: check
-- (eids json, fence, now) a row if all of them are held
SELECT true
FROM coord_eidlock
WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
AND fence = $2::bigint
AND expires_at > coalesce(to_timestamp($3::bigint / 1e6), clock_timestamp())
HAVING count(*) = jsonb_array_length($1::jsonb);

-- name: guard
-- (eids json, fence, now) a row if all of them are held, and then until the transaction ends
WITH guarded AS ( -- KEY SHARE: a takeover, which takes the full lock, waits for it; a renewal or a release does not.
    SELECT expires_at
    FROM coord_eidlock
    WHERE eid = ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))
    AND fence = $2::bigint
    ORDER BY eid
    FOR KEY SHARE
), judged AS (
    SELECT coalesce(to_timestamp($3::bigint / 1e6), clock_timestamp()) AS now, count(*) AS live, min(expires_at) AS ends FROM guarded
)
SELECT true
FROM judged
WHERE live = jsonb_array_length($1::jsonb) AND ends > now;

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as were released, or had expired longer than age ago
WITH expired AS (
    SELECT eid
    FROM coord_eidlock
    WHERE expires_at = 'epoch'
    OR expires_at <= coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
    ORDER BY eid
    LIMIT 10000
    FOR UPDATE SKIP LOCKED -- A row that is in use is not stale.
)
DELETE FROM coord_eidlock AS lock
USING expired
WHERE lock.eid = expired.eid;
