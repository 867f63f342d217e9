-- Reservations of one type: one row per key, kept when the key is freed, until Purge.
-- A key is taken while it is confirmed or expires_at > now. Each hold has an expiry of its own.
-- Times and durations are microseconds; a null "now" means the database's clock.

-- Updates stay HOT: what they change has no index, and a page has room for new versions.
CREATE TABLE IF NOT EXISTS coord_reservation__context__aggregate (
    tenant        text          COLLATE "C" NOT NULL,
    namespace     text          COLLATE "C" NOT NULL,
    key           text          COLLATE "C" NOT NULL,
    owner_tenant  text          NOT NULL, -- of a key that is free: the last owner
    owner_id      text          NOT NULL,
    confirmed     boolean       NOT NULL,
    version       bigint        NOT NULL, -- that it is confirmed at, else 0
    holds         text[]        NOT NULL,
    hold_expires  timestamptz[] NOT NULL, -- of each hold
    hold_attempts bigint[]      NOT NULL, -- the Reserve that added each hold; 0 once a second one has found it there
    expires_at    timestamptz   NOT NULL, -- the last expiry of the holds; 'epoch' without holds
    released      jsonb         NOT NULL, -- a list of [owner's tenant, its id, version, at]: the last release of each owner
    PRIMARY KEY (tenant, namespace, key)
) WITH (fillfactor = 40);

INSERT INTO coord_format (table_name, format) VALUES ('coord_reservation__context__aggregate', 1) ON CONFLICT DO NOTHING;

-- name: reserve
-- (tenant, namespace, key, owner's tenant, owner's id, hold, ttl, now, attempt, bounded: it waits half a second at most)
-- row of (granted, owner's tenant, owner's id, confirmed, version, holds json, expires); none if a rival was faster
WITH held AS ( -- Look first: a refused attempt writes nothing.
    SELECT owner_tenant, owner_id, confirmed, version, expires_at
    FROM coord_reservation__context__aggregate
    WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text
    AND (owner_tenant, owner_id) <> ($4::text, $5::text)
    AND (confirmed OR expires_at > coalesce(to_timestamp($8::bigint / 1e6), clock_timestamp()))
), won AS (
    INSERT INTO coord_reservation__context__aggregate AS reservation
        (tenant, namespace, key, owner_tenant, owner_id, confirmed, version, holds, hold_expires, hold_attempts, expires_at, released)
    SELECT $1::text, $2::text, $3::text, $4::text, $5::text, false, 0, ARRAY[$6::text], ARRAY[fresh.expires], ARRAY[$9::bigint], fresh.expires, '[]'
    FROM (
        SELECT coalesce(to_timestamp($8::bigint / 1e6), clock_timestamp()) + $7::bigint * interval '1 microsecond' AS expires
    ) AS fresh
    WHERE NOT EXISTS (SELECT FROM held)
    -- Bounds the wait for a rival's transaction, in this transaction alone. One of the caller's own waits as it would anywhere.
    AND CASE WHEN $10::boolean THEN set_config('lock_timeout', '500', true) IS NOT NULL ELSE true END
    ON CONFLICT (tenant, namespace, key) DO UPDATE -- From here on the row is owned, and the clock is read again.
    SET owner_tenant = excluded.owner_tenant,
        owner_id = excluded.owner_id,
        (holds, hold_expires, hold_attempts, expires_at) = (
            SELECT array_agg(hold), array_agg(expires), array_agg(attempt), max(expires)
            FROM (
                SELECT coalesce(to_timestamp($8::bigint / 1e6), clock_timestamp()) AS now
            ) AS judged, LATERAL (
                SELECT hold, expires, attempt
                FROM unnest(reservation.holds, reservation.hold_expires, reservation.hold_attempts) AS other(hold, expires, attempt)
                WHERE hold <> $6::text AND expires > judged.now
                AND (reservation.owner_tenant, reservation.owner_id) = ($4::text, $5::text)
                UNION ALL
                SELECT $6::text, greatest(max(expires), judged.now + $7::bigint * interval '1 microsecond'), -- Never shortened.
                    -- A hold that was there is nobody's to undo: either of the two may have been told that it has it.
                    CASE WHEN max(attempt) <> $9::bigint THEN 0 ELSE $9::bigint END
                FROM unnest(reservation.holds, reservation.hold_expires, reservation.hold_attempts) AS same(hold, expires, attempt)
                WHERE hold = $6::text AND expires > judged.now
                AND (reservation.owner_tenant, reservation.owner_id) = ($4::text, $5::text)
            ) AS kept
        )
    WHERE (reservation.owner_tenant, reservation.owner_id) = ($4::text, $5::text)
    OR NOT reservation.confirmed AND reservation.expires_at <= coalesce(to_timestamp($8::bigint / 1e6), clock_timestamp())
    RETURNING owner_tenant, owner_id, confirmed, version, holds, expires_at
)
SELECT true, owner_tenant, owner_id, confirmed, version, to_json(holds)::text, (extract(epoch FROM expires_at) * 1000000)::bigint FROM won
UNION ALL
SELECT false, owner_tenant, owner_id, confirmed, version, '[]', (extract(epoch FROM expires_at) * 1000000)::bigint FROM held;

-- name: undo
-- (tenant, namespace, key, attempt) one row changed if that attempt had added a hold
UPDATE coord_reservation__context__aggregate AS reservation
SET (holds, hold_expires, hold_attempts, expires_at) = (
    SELECT coalesce(array_agg(hold), '{}'), coalesce(array_agg(expires), '{}'), coalesce(array_agg(attempt), '{}'), coalesce(max(expires), 'epoch')
    FROM unnest(reservation.holds, reservation.hold_expires, reservation.hold_attempts) AS other(hold, expires, attempt)
    WHERE attempt <> $4::bigint
)
WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text
AND $4::bigint = ANY (hold_attempts);

-- name: confirm
-- (tenant, namespace, key, owner's tenant, owner's id, version, now) row of (outcome, as refusal has it, or 1 if it is confirmed now); none if a rival was faster
WITH refused AS ( -- Look first: a refused attempt writes nothing.
    SELECT CASE
        WHEN (owner_tenant, owner_id) <> ($4::text, $5::text)
            AND (confirmed OR expires_at > coalesce(to_timestamp($7::bigint / 1e6), clock_timestamp())) THEN 4
        WHEN confirmed AND version >= $6::bigint THEN 2
        WHEN EXISTS (
            SELECT FROM jsonb_array_elements(released) AS former
            WHERE (former ->> 0, former ->> 1) = ($4::text, $5::text) AND (former ->> 2)::bigint >= $6::bigint
        ) THEN 3
    END AS outcome
    FROM coord_reservation__context__aggregate
    WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text
), won AS (
    INSERT INTO coord_reservation__context__aggregate AS reservation
        (tenant, namespace, key, owner_tenant, owner_id, confirmed, version, holds, hold_expires, hold_attempts, expires_at, released)
    SELECT $1::text, $2::text, $3::text, $4::text, $5::text, true, $6::bigint, '{}', '{}', '{}', 'epoch', '[]'
    WHERE NOT EXISTS (SELECT FROM refused WHERE outcome > 1)
    ON CONFLICT (tenant, namespace, key) DO UPDATE -- From here on the row is owned.
    SET owner_tenant = excluded.owner_tenant,
        owner_id = excluded.owner_id,
        confirmed = true,
        version = excluded.version,
        holds = '{}',
        hold_expires = '{}',
        hold_attempts = '{}',
        expires_at = 'epoch'
    WHERE CASE
        WHEN (reservation.owner_tenant, reservation.owner_id) <> ($4::text, $5::text)
            AND (reservation.confirmed OR reservation.expires_at > coalesce(to_timestamp($7::bigint / 1e6), clock_timestamp())) THEN false
        WHEN reservation.confirmed THEN reservation.version < $6::bigint
        ELSE NOT EXISTS (
            SELECT FROM jsonb_array_elements(reservation.released) AS former
            WHERE (former ->> 0, former ->> 1) = ($4::text, $5::text) AND (former ->> 2)::bigint >= $6::bigint
        )
    END
    RETURNING 1 AS outcome
)
SELECT outcome::bigint FROM won
UNION ALL
SELECT outcome::bigint FROM refused WHERE outcome > 1;

-- name: refusal
-- (tenant, namespace, key, owner's tenant, owner's id, version, now) row of (2 confirmed before, 3 stale, 4 taken by another; 0 for none of them), or none
SELECT CASE
    WHEN (owner_tenant, owner_id) <> ($4::text, $5::text)
        AND (confirmed OR expires_at > coalesce(to_timestamp($7::bigint / 1e6), clock_timestamp())) THEN 4
    WHEN confirmed AND version >= $6::bigint THEN 2
    WHEN EXISTS (
        SELECT FROM jsonb_array_elements(released) AS former
        WHERE (former ->> 0, former ->> 1) = ($4::text, $5::text) AND (former ->> 2)::bigint >= $6::bigint
    ) THEN 3
    ELSE 0
END::bigint
FROM coord_reservation__context__aggregate
WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text;

-- name: abandon
-- (tenant, namespace, key, owner's tenant, owner's id, hold) a row if the hold was there
-- In one statement: if the row changes while this waits for it, all of this is computed again from the new row.
UPDATE coord_reservation__context__aggregate AS reservation
SET (holds, hold_expires, hold_attempts, expires_at) = ( -- Without a hold it is free, unless it is confirmed.
    SELECT coalesce(array_agg(hold), '{}'), coalesce(array_agg(expires), '{}'), coalesce(array_agg(attempt), '{}'), coalesce(max(expires), 'epoch')
    FROM unnest(reservation.holds, reservation.hold_expires, reservation.hold_attempts) AS other(hold, expires, attempt)
    WHERE hold <> $6::text
)
WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text
AND (owner_tenant, owner_id) = ($4::text, $5::text)
AND $6::text = ANY (holds)
RETURNING true;

-- name: release
-- (tenant, namespace, key, owner's tenant, owner's id, version, now) a row if it was confirmed, and not later than at that version
UPDATE coord_reservation__context__aggregate AS reservation -- No need to lock first: if this waits for the row, expiry is judged again.
SET confirmed = false,
    version = 0,
    (holds, hold_expires, hold_attempts, expires_at) = (
        SELECT coalesce(array_agg(hold), '{}'), coalesce(array_agg(expires), '{}'), coalesce(array_agg(attempt), '{}'), coalesce(max(expires), 'epoch')
        FROM unnest(reservation.holds, reservation.hold_expires, reservation.hold_attempts) AS live(hold, expires, attempt)
        WHERE expires > judged.now
    ),
    released = ( -- Remembered whoever has the key next, or a Confirm from before could resurrect it.
        SELECT coalesce(jsonb_agg(former), '[]')
        FROM jsonb_array_elements(reservation.released) AS former
        WHERE (former ->> 0, former ->> 1) <> ($4::text, $5::text)
    ) || jsonb_build_array(jsonb_build_array($4::text, $5::text, $6::bigint, (extract(epoch FROM judged.now) * 1000000)::bigint))
FROM (
    SELECT coalesce(to_timestamp($7::bigint / 1e6), clock_timestamp()) AS now
) AS judged
WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text
AND (owner_tenant, owner_id) = ($4::text, $5::text)
AND confirmed AND version <= $6::bigint
RETURNING true;

-- name: find
-- (tenant, namespace, key, now) row of (owner's tenant, owner's id, confirmed, version, live holds json, expires or 0), or none
SELECT owner_tenant, owner_id, confirmed, version, alive.holds, alive.expires
FROM coord_reservation__context__aggregate AS reservation, (
    SELECT coalesce(to_timestamp($4::bigint / 1e6), clock_timestamp()) AS now
) AS judged, LATERAL (
    SELECT coalesce(json_agg(hold), '[]')::text AS holds, coalesce((extract(epoch FROM max(expires)) * 1000000)::bigint, 0) AS expires
    FROM unnest(reservation.holds, reservation.hold_expires) AS live(hold, expires)
    WHERE expires > judged.now
) AS alive
WHERE tenant = $1::text AND namespace = $2::text AND key = $3::text
AND (confirmed OR expires_at > judged.now);

-- name: purge
-- (age, now) as many rows changed, 10000 at most, as had been free, or had expired, and not been released since longer than age ago
WITH expired AS (
    SELECT tenant, namespace, key
    FROM coord_reservation__context__aggregate
    WHERE NOT confirmed
    AND expires_at <= coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
    AND NOT EXISTS (
        SELECT FROM jsonb_array_elements(released) AS former
        WHERE to_timestamp((former ->> 3)::bigint / 1e6) > coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
    )
    ORDER BY tenant, namespace, key
    LIMIT 10000
    FOR UPDATE SKIP LOCKED -- A row that is in use is not stale.
)
DELETE FROM coord_reservation__context__aggregate AS reservation
USING expired
WHERE reservation.tenant = expired.tenant AND reservation.namespace = expired.namespace AND reservation.key = expired.key;

-- name: trim
-- (age, now) forgets releases from longer than age ago of up to 10000 keys that stay: a row must not grow for ever
WITH grown AS (
    SELECT tenant, namespace, key
    FROM coord_reservation__context__aggregate
    WHERE EXISTS (
        SELECT FROM jsonb_array_elements(released) AS former
        WHERE to_timestamp((former ->> 3)::bigint / 1e6) <= coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
    )
    ORDER BY tenant, namespace, key
    LIMIT 10000
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE coord_reservation__context__aggregate AS reservation
SET released = (
    SELECT coalesce(jsonb_agg(former), '[]')
    FROM jsonb_array_elements(reservation.released) AS former
    WHERE to_timestamp((former ->> 3)::bigint / 1e6) > coalesce(to_timestamp($2::bigint / 1e6), clock_timestamp()) - $1::bigint * interval '1 microsecond'
)
FROM grown
WHERE reservation.tenant = grown.tenant AND reservation.namespace = grown.namespace AND reservation.key = grown.key;
