-- Claims keys that have no row. Returns those. A key that has a row is neither locked nor written.
-- Rows are inserted in the order of the arrays.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout, {claim_durable} AS durability,
    $5::int8 * interval '1 millisecond' AS retention, $6::int8 * interval '1 millisecond' AS lease
)
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type
)
SELECT a.key, a.namespace, a.id, a.token, a.now + a.lease, 1, false,
  a.now, NULL, a.now + a.retention, a.event_type
FROM (
  SELECT a.key, a.namespace, a.id, a.token,
    s.retention, s.lease, a.event_type, clock_timestamp() AS now
  FROM settings AS s, unnest(
    $1::uuid[], $2::text[], $3::text[], $4::uuid[], $7::text[]
  ) AS a (
    key, namespace, id, token, event_type
  ){pass_unless_exists}
) AS a
ON CONFLICT (key) DO NOTHING
RETURNING t.key
