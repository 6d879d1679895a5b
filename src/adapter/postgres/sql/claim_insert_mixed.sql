-- Claims keys that have no row. Returns those. A key that has a row is neither locked nor written.
-- Several keys, each with its own terms. Rows are inserted in the order of the arrays.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {claim_durable} AS durability
)
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type
)
SELECT a.key, a.namespace, a.id, a.token, a.now + a.lease, 1, false,
  a.now, NULL, a.now + a.retention, a.event_type
FROM (
  SELECT a.key, a.namespace, a.id, a.token,
    a.retention * interval '1 millisecond' AS retention,
    a.lease * interval '1 millisecond' AS lease, a.event_type, clock_timestamp() AS now
  FROM settings, unnest(
    $1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[], $7::int8[], $8::text[]
  ) AS a (
    key, namespace, id, token, retention, lease, event_type
  )
) AS a
ON CONFLICT (key) DO NOTHING
RETURNING t.key
