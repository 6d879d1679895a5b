-- Releases the leases of these tokens. The row stays, with its attempts.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {durable} AS durability
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key
  FROM settings
  CROSS JOIN unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[])
    AS a (key, namespace, id, token, retention)
  JOIN {table} AS t ON t.key = a.key
  WHERE t.token = a.token AND t.completed_at IS NULL
  ORDER BY t.key
  FOR UPDATE OF t
)
UPDATE {table} AS t SET token = NULL, lease_until = NULL
FROM locked AS l
WHERE t.key = l.key
RETURNING t.key
