-- Undoes claims that were complete at once: deletes the complete rows of these tokens. A row with an
-- audit stays, and is released.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {durable} AS durability
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key, t.rerun_at IS NOT NULL AS rerun
  FROM settings
  CROSS JOIN unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[])
    AS a (key, namespace, id, token, retention)
  JOIN {table} AS t ON t.key = a.key
  WHERE t.token = a.token AND t.completed_at IS NOT NULL
  ORDER BY t.key
  FOR UPDATE OF t
), released AS (
  UPDATE {table} AS t SET
    token = NULL, completed_at = NULL,
    payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
  FROM locked AS l
  WHERE t.key = l.key AND l.rerun
  RETURNING t.key
), deleted AS (
  DELETE FROM {table} AS t
  USING locked AS l
  WHERE t.key = l.key AND NOT l.rerun
  RETURNING t.key
)
SELECT key FROM released UNION ALL SELECT key FROM deleted
