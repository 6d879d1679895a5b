-- Undoes claims that were complete at once: the complete rows of these tokens expire. Otherwise as `release.sql`.
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
  token = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.token END,
  attempts = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN 0 ELSE t.attempts END,
  takeover = t.takeover AND (t.completed_at IS NOT NULL AND t.token = excluded.token) IS NOT TRUE,
  completed_at = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.completed_at END,
  expires_at = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN clock_timestamp()
    ELSE greatest(t.expires_at, clock_timestamp()) END,
  event_type = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.event_type END,
  payload_sha256 = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.payload_sha256 END,
  response_status = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.response_status END,
  response_headers = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.response_headers END,
  response_body = CASE WHEN t.completed_at IS NOT NULL AND t.token = excluded.token THEN NULL ELSE t.response_body END
RETURNING t.key
