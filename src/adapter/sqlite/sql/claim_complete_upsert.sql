-- As `claim_upsert.sql`. The rows are complete at once, with their stored data: now, or when an event of the past was
-- handled, which is not later. So no row is under a lease of the caller's own token.
-- {handled_at}: min(coalesce(value ->> 10, {now}), {now})
INSERT INTO {table} AS t (
  namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), 1, 0,
  {handled_at}, {handled_at}, {handled_at} + (value ->> 3), value ->> 5,
  unhex(value ->> 6), value ->> 7, value ->> 8, unhex(value ->> 9)
FROM json_each(?1)
WHERE true
ON CONFLICT (namespace, id) DO UPDATE SET
  token = excluded.token,
  lease_until = NULL,
  attempts = CASE WHEN t.expires_at <= {now} THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN t.expires_at <= {now} THEN 0 ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN t.expires_at <= {now} THEN excluded.first_seen_at ELSE t.first_seen_at END,
  completed_at = excluded.completed_at,
  expires_at = excluded.expires_at,
  event_type = CASE WHEN t.expires_at <= {now} THEN excluded.event_type ELSE t.event_type END,
  payload_sha256 = excluded.payload_sha256, response_status = excluded.response_status,
  response_headers = excluded.response_headers, response_body = excluded.response_body
WHERE (t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= {now}))
  OR (t.completed_at IS NOT NULL AND t.expires_at <= {now})
RETURNING namespace, id, attempts, takeover
