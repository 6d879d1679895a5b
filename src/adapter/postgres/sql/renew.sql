-- Moves the lease of rows that their token holds, and inserts missing rows. Returns those, and the rows that open
-- transactions hold: they are passed over.
-- Rows are locked and inserted in the order of `key`, so that two batches never deadlock.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{lock_timeout}', true) AS lock_timeout, {durable} AS durability,
    $5::int8 * interval '1 millisecond' AS retention, $6::int8 * interval '1 millisecond' AS lease
){held}, renewed AS (
  INSERT INTO {table} AS t (
    key, namespace, id, token, lease_until, attempts, takeover,
    first_seen_at, completed_at, expires_at, event_type
  )
  SELECT a.key, a.namespace, a.id, a.token, clock_timestamp() + s.lease, 1, false,
    clock_timestamp(), NULL, clock_timestamp() + s.retention, a.event_type
  FROM settings AS s, unnest(
    $1::uuid[], $2::text[], $3::text[], $4::uuid[], $7::text[]
  ) AS a (
    key, namespace, id, token, event_type
  )
  {unless_held}
  ORDER BY a.key
  ON CONFLICT (key) DO UPDATE SET version = t.version + 1, lease_until = excluded.lease_until
  -- A release leaves a row without a lease, which no renewal revives. A complete row with one waits for its response.
  WHERE t.token = excluded.token AND t.lease_until IS NOT NULL
    AND (t.completed_at IS NULL OR t.response_status IS NULL)
  RETURNING t.key
)
SELECT key, false AS is_held FROM renewed
UNION ALL
SELECT key, true FROM held
