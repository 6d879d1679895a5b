-- Claims keys that have no row, complete at once. Returns those.
-- A key that has a row is neither locked nor written.
-- Several keys with the same terms and no data to store. Rows are inserted in the order of the arrays.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {durable} AS durability,
    $2::text AS namespace, $5::int8 * interval '1 millisecond' AS retention
)
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type
)
SELECT a.key, a.namespace, a.id, a.token, NULL, 1, false,
  a.now, a.now, a.now + a.retention, a.event_type
FROM (
  SELECT a.key, s.namespace, a.id, a.token,
    s.retention, a.event_type, clock_timestamp() AS now
  FROM settings AS s, unnest(
    $1::uuid[], $3::text[], $4::uuid[], $7::text[]
  ) AS a (
    key, id, token, event_type
  )
) AS a
ON CONFLICT (key) DO NOTHING
RETURNING t.key
