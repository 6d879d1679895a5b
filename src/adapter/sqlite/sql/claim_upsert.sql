-- Claims rows that no live lease holds, those that the caller's own token holds, and missing rows.
-- A claim that is repeated with its token counts no attempt. A key that is claimed again after it has
-- expired loses its stored data.
{leased_rows}
ON CONFLICT (namespace, id) DO UPDATE SET
  token = excluded.token,
  lease_until = excluded.lease_until,
  attempts = CASE WHEN (t.completed_at IS NULL AND t.token IS excluded.token) THEN t.attempts
    WHEN t.expires_at <= {now} THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN (t.completed_at IS NULL AND t.token IS excluded.token) THEN t.takeover
    WHEN t.expires_at <= {now} THEN 0 ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN NOT (t.completed_at IS NULL AND t.token IS excluded.token) AND t.expires_at <= {now}
    THEN excluded.first_seen_at ELSE t.first_seen_at END,
  completed_at = NULL,
  expires_at = excluded.expires_at,
  event_type = CASE
    WHEN t.expires_at > {now} OR (t.completed_at IS NULL AND t.token IS excluded.token)
    THEN t.event_type ELSE excluded.event_type END,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
WHERE (t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= {now}))
  OR (t.completed_at IS NOT NULL AND t.expires_at <= {now})
  OR (t.completed_at IS NULL AND t.token IS excluded.token)
RETURNING namespace, id, attempts, takeover
