-- Claims keys that have no row. Returns those. A key that has a row is neither locked nor written.
--
-- The arrays are in the order of `key`. With a synchronous standby, only a durable claim keeps a primary that was cut
-- off from granting keys beside its successor.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout,
    CASE WHEN NOT {durable_claims} AND current_setting('synchronous_standby_names') = ''
      THEN set_config('synchronous_commit', 'off', true)
      WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN set_config('synchronous_commit', 'on', true) END AS durability,
    $5::int8 * interval '1 millisecond' AS retention, $7::int8 * interval '1 millisecond' AS lease
)
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at, event_type
)
SELECT a.key, a.namespace, a.id, a.token, a.now + a.lease, 1, false, a.now, a.now + a.retention, a.event_type
FROM (
  SELECT a.*, s.retention, s.lease, clock_timestamp() AS now
  FROM settings AS s, unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $6::text[])
    AS a (key, namespace, id, token, event_type)
  -- only to pass over rows:
  -- An insertion would wait for the transaction that holds the row. With the keys in a subquery, Postgres keeps one
  -- plan for any number of keys. As a join, it takes twice the time for a few keys.
  WHERE a.key <> ALL (ARRAY(SELECT key FROM {table} WHERE key = ANY ((SELECT $1::uuid[])::uuid[])))
  -- end
) AS a
ON CONFLICT (key) DO NOTHING
RETURNING t.key
