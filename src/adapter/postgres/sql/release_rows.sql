-- Raises the version of each row, and inserts an expired row where there is none.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout, {durable} AS durability
){pass_held}
INSERT INTO {table} AS t (
  key, namespace, id, token, attempts, takeover, first_seen_at, expires_at
)
SELECT a.key, a.namespace, a.id, a.token, 0, false, clock_timestamp(), clock_timestamp()
FROM settings
CROSS JOIN unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[]) AS a (key, namespace, id, token){pass_unless_held}
ORDER BY a.key
ON CONFLICT (key) DO UPDATE SET
  version = t.version + 1,
