-- Makes rows expire, at the versions that were read, unless a live lease holds them. Rows stay, so that a claim that
-- was made before cannot insert its row again.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{lock_timeout}', true) AS lock_timeout, {durable} AS durability
)
UPDATE {table} AS t SET
  version = t.version + 1,
  token = NULL, lease_until = NULL, attempts = 0, takeover = false,
  completed_at = NULL, expires_at = clock_timestamp(), event_type = NULL,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
FROM settings
CROSS JOIN unnest($1::uuid[], $6::int8[]) AS a (key, version)
WHERE t.key = a.key AND t.version = a.version
  AND (t.completed_at IS NOT NULL OR t.lease_until IS NULL OR t.lease_until <= clock_timestamp())
RETURNING t.key
