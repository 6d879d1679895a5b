-- Undoes claims that were complete at once: deletes the complete rows of these tokens.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {durable} AS durability
), locked AS MATERIALIZED (
  -- In the order of `key`: a DELETE locks in any order.
  SELECT t.key
  FROM settings
  CROSS JOIN unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[])
    AS a (key, namespace, id, token, retention)
  JOIN {table} AS t ON t.key = a.key
  WHERE t.token = a.token AND t.completed_at IS NOT NULL
  ORDER BY t.key
  FOR UPDATE OF t
)
DELETE FROM {table} AS t
USING locked AS l
WHERE t.key = l.key
RETURNING t.key
