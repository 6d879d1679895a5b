-- Makes a row expire, at the version that was read, unless a live lease or an open transaction holds it. The row stays,
-- so that a claim that was made before cannot insert it again.
WITH settings AS MATERIALIZED (
  SELECT CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
    THEN set_config('synchronous_commit', 'on', true) END AS durability
), locked AS MATERIALIZED (
  SELECT t.key
  FROM settings, {table} AS t
  WHERE t.key = $1 AND t.version = $2
    AND (t.completed_at IS NOT NULL OR t.lease_until IS NULL OR t.lease_until <= clock_timestamp())
  FOR UPDATE OF t SKIP LOCKED
)
UPDATE {table} AS t SET
  version = t.version + 1,
  token = NULL, lease_until = NULL, attempts = 0, takeover = false,
  completed_at = NULL, expires_at = clock_timestamp(), event_type = NULL,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
FROM locked AS l
WHERE t.key = l.key
RETURNING t.key
