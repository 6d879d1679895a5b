-- Releases rows of these tokens: incomplete rows that were claimed under a lease, with their attempts, and complete rows
-- that were claimed without one, which expire. Returns the rows that it wrote.
--
-- A release is a fence: it raises the version of each row, and inserts an expired row where there is none. So no
-- claim of the token takes effect any more that was made before it. The inserted row has the token, because
-- `excluded` must name it, and no lease, because a row without a lease is nobody's.
-- {is_released}: (t.token = excluded.token AND (t.completed_at IS NULL) = ($7::int8 IS NOT NULL))
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout,
    CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN set_config('synchronous_commit', 'on', true) END AS durability
-- only to pass over rows:
), locked AS MATERIALIZED (
  SELECT t.key FROM {table} AS t WHERE t.key = ANY ($1::uuid[]) ORDER BY t.key FOR UPDATE SKIP LOCKED
), locked_by_others AS MATERIALIZED (
  SELECT t.key FROM {table} AS t
  WHERE t.key = ANY ($1::uuid[]) AND NOT EXISTS (SELECT FROM locked AS l WHERE l.key = t.key)
-- end
)
INSERT INTO {table} AS t (key, namespace, id, token, attempts, takeover, first_seen_at, expires_at)
SELECT a.key, a.namespace, a.id, a.token, 0, false, clock_timestamp(), clock_timestamp()
FROM settings
CROSS JOIN unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[]) AS a (key, namespace, id, token)
-- only to pass over rows:
WHERE NOT EXISTS (SELECT FROM locked_by_others AS l WHERE l.key = a.key)
-- end
ORDER BY a.key
ON CONFLICT (key) DO UPDATE SET
  version = t.version + 1,
  token = CASE WHEN {is_released} THEN NULL ELSE t.token END,
  lease_until = CASE WHEN {is_released} THEN NULL ELSE t.lease_until END,
  attempts = CASE WHEN {is_released} AND t.completed_at IS NOT NULL THEN 0 ELSE t.attempts END,
  takeover = t.takeover AND ({is_released} AND t.completed_at IS NOT NULL) IS NOT TRUE,
  completed_at = CASE WHEN {is_released} THEN NULL ELSE t.completed_at END,
  expires_at = CASE WHEN {is_released} AND t.completed_at IS NOT NULL THEN clock_timestamp()
    ELSE greatest(t.expires_at, clock_timestamp()) END,
  event_type = CASE WHEN {is_released} AND t.completed_at IS NOT NULL THEN NULL ELSE t.event_type END,
  payload_sha256 = CASE WHEN {is_released} THEN NULL ELSE t.payload_sha256 END,
  response_status = CASE WHEN {is_released} THEN NULL ELSE t.response_status END,
  response_headers = CASE WHEN {is_released} THEN NULL ELSE t.response_headers END,
  response_body = CASE WHEN {is_released} THEN NULL ELSE t.response_body END
RETURNING t.key
