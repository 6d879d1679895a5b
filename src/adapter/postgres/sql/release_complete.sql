-- Undoes claims that were complete at once: the complete rows of these tokens expire. Otherwise as `release.sql`.
{release_rows}
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
