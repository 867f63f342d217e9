-- Leases: one row per partition of a group, kept for ever, so that its epoch only grows.
-- Times and durations are microseconds; a null "now" means the database's clock.

-- Renewals stay HOT: expires_at has no index, and a page has room for a new version of every row on it.
CREATE TABLE IF NOT EXISTS coord_lease (
    group_name text        COLLATE "C" NOT NULL,
    partition  bigint      NOT NULL,
    owner      text        NOT NULL,
    epoch      bigint      NOT NULL,
    attempt    bigint      NOT NULL, -- the last acquisition or release: the Coord in the upper half, a count in the lower
    dated      timestamptz NOT NULL, -- the "now" of the last grant or renewal: an older one that arrives late changes nothing
    expires_at timestamptz NOT NULL, -- 'epoch' once released
    PRIMARY KEY (group_name, partition)
) WITH (fillfactor = 40);

INSERT INTO coord_format (table_name, format) VALUES ('coord_lease', 1) ON CONFLICT DO NOTHING;

-- name: acquire
-- (group, partition, owner, ttl, now, attempt) row of (granted, owner, epoch, expires); none if a rival was faster, or
-- another transaction has locked the row: it is never waited for
WITH seen AS MATERIALIZED (
    SELECT owner, epoch, expires_at
    FROM coord_lease
    WHERE group_name = $1::text AND partition = $2::bigint
), held AS ( -- Look first: a refused attempt writes nothing.
    SELECT owner, epoch, expires_at
    FROM seen
    WHERE owner <> $3::text
    AND expires_at > coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp())
), made AS (
    INSERT INTO coord_lease (group_name, partition, owner, epoch, attempt, dated, expires_at)
    SELECT $1::text, $2::bigint, $3::text, 1, $6::bigint,
        coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()),
        coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()) + $4::bigint * interval '1 microsecond'
    WHERE NOT EXISTS (SELECT FROM seen)
    AND set_config('lock_timeout', '500', true) IS NOT NULL -- Bounds the wait for a rival's insert, in this transaction alone.
    ON CONFLICT (group_name, partition) DO NOTHING
    RETURNING owner, epoch, expires_at
), mine AS ( -- Judged again once it is owned. The full lock, which no row under an open guard gives.
    SELECT group_name, partition
    FROM coord_lease
    WHERE group_name = $1::text AND partition = $2::bigint
    AND EXISTS (SELECT FROM seen) AND NOT EXISTS (SELECT FROM held)
    AND (owner = $3::text
            AND NOT (attempt >> 32 = $6::bigint >> 32 AND attempt > $6::bigint) -- This one is late: not over a later one of its Coord.
        OR expires_at <= coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()))
    FOR UPDATE SKIP LOCKED
), won AS (
    UPDATE coord_lease AS lease
    SET owner = $3::text,
        epoch = lease.epoch + 1,
        attempt = $6::bigint,
        dated = coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()),
        expires_at = coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()) + $4::bigint * interval '1 microsecond'
    FROM mine
    WHERE lease.group_name = mine.group_name AND lease.partition = mine.partition
    RETURNING lease.owner, lease.epoch, lease.expires_at
)
SELECT true, owner, epoch, (extract(epoch FROM expires_at) * 1000000)::bigint FROM made
UNION ALL
SELECT true, owner, epoch, (extract(epoch FROM expires_at) * 1000000)::bigint FROM won
UNION ALL
SELECT false, owner, epoch, (extract(epoch FROM expires_at) * 1000000)::bigint FROM held;

-- name: holder
-- (group, partition, owner, now) row of (owner, expires) if another has it; none if it is free or owner's
SELECT owner, (extract(epoch FROM expires_at) * 1000000)::bigint
FROM coord_lease
WHERE group_name = $1::text AND partition = $2::bigint AND owner <> $3::text
AND expires_at > coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp());

-- name: undo
-- (group, partition, owner, attempt) one row changed if that attempt had been granted
UPDATE coord_lease
SET expires_at = 'epoch'
WHERE group_name = $1::text AND partition = $2::bigint AND owner = $3::text AND attempt = $4::bigint
AND expires_at > 'epoch';

-- name: renew
-- (group, partitions json, owner, ttl, now) rows of (partition, epoch, expires, renewed); not renewed: another
-- transaction has locked the row, and the next renewal will tell
WITH mine AS MATERIALIZED ( -- Lock first: an UPDATE alone would judge expiry before it waits for the row.
    SELECT partition, expires_at
    FROM coord_lease
    WHERE group_name = $1::text AND owner = $3::text
    AND partition = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text($2::jsonb)))
    ORDER BY partition -- In key order: two renewals never wait for each other crosswise.
    FOR NO KEY UPDATE SKIP LOCKED -- One row that is locked does not hold up the others.
), judged AS ( -- Counting them makes now the moment when all are locked: one can expire while we wait for another.
    SELECT coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp()) AS now, count(*) AS locked FROM mine
), renewed AS (
    UPDATE coord_lease AS lease
    SET dated = greatest(lease.dated, judged.now),
        expires_at = CASE WHEN judged.now < lease.dated THEN lease.expires_at ELSE judged.now + $4::bigint * interval '1 microsecond' END
    FROM mine, judged
    WHERE lease.group_name = $1::text AND lease.partition = mine.partition
    AND mine.expires_at > judged.now
    RETURNING lease.partition, lease.epoch, lease.expires_at
)
SELECT partition, epoch, (extract(epoch FROM expires_at) * 1000000)::bigint, true FROM renewed
UNION ALL
SELECT partition, epoch, (extract(epoch FROM expires_at) * 1000000)::bigint, false
FROM coord_lease
WHERE (SELECT locked FROM judged) < jsonb_array_length($2::jsonb) -- Read only if some rows could not be locked.
AND group_name = $1::text AND owner = $3::text
AND partition = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text($2::jsonb)))
AND expires_at > (SELECT now FROM judged)
AND (partition IN (SELECT partition FROM mine)) IS NOT TRUE; -- IS NOT TRUE: a hash table, never a join, which would compare each with each.

-- name: release
-- (group, partition, owner, epoch, attempt) one row changed the first time; epoch 0 is any
UPDATE coord_lease
SET attempt = $5::bigint, expires_at = 'epoch'
WHERE group_name = $1::text AND partition = $2::bigint AND owner = $3::text
AND ($4::bigint = 0 OR epoch = $4::bigint)
AND (expires_at > 'epoch' OR attempt = $5::bigint); -- Or sent twice, and the first was done.

-- name: owners
-- (group, now) rows of (partition, owner, epoch, expires), by partition
SELECT partition, owner, epoch, (extract(epoch FROM expires_at) * 1000000)::bigint
FROM coord_lease
WHERE group_name = $1::text
AND expires_at > coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp())
ORDER BY partition;

-- name: guard
-- (group, partition, owner, epoch, now) a row if it is still held, and then until the transaction ends
WITH guarded AS ( -- KEY SHARE: a takeover, which names the key, waits for it; a renewal or a release does not.
    SELECT expires_at
    FROM coord_lease
    WHERE group_name = $1::text AND partition = $2::bigint AND owner = $3::text AND epoch = $4::bigint
    FOR KEY SHARE
)
SELECT true
FROM guarded
WHERE expires_at > coalesce(to_timestamp($5::bigint / 1e6), clock_timestamp());
