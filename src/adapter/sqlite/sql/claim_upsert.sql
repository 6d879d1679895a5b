-- Claims rows that no live lease holds, those that the caller's own token holds, and missing rows. A claim that is
-- repeated with its token counts no attempt. A key that is claimed again after it has expired loses its stored data.
-- {is_own}: (t.completed_at IS NULL AND t.token IS excluded.token)
INSERT INTO {table} AS t (
  namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at, event_type
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), {now} + (value ->> 4), 1, 0,
  {now}, {now} + (value ->> 3), value ->> 5
FROM json_each(?1)
WHERE true
ON CONFLICT (namespace, id) DO UPDATE SET
  token = excluded.token,
  lease_until = excluded.lease_until,
  attempts = CASE WHEN {is_own} THEN t.attempts WHEN t.expires_at <= {now} THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN {is_own} THEN t.takeover WHEN t.expires_at <= {now} THEN 0 ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN NOT {is_own} AND t.expires_at <= {now} THEN excluded.first_seen_at
    ELSE t.first_seen_at END,
  completed_at = NULL,
  expires_at = excluded.expires_at,
  event_type = CASE WHEN NOT {is_own} AND t.expires_at <= {now} THEN excluded.event_type ELSE t.event_type END,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
WHERE (t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= {now}))
  OR (t.completed_at IS NOT NULL AND t.expires_at <= {now})
  OR {is_own}
RETURNING namespace, id, attempts, takeover
