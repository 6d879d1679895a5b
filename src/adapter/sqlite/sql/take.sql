-- Claims rows that no live lease holds, those that the caller's own token holds under a lease, and missing rows.
-- A claim that is repeated with its token counts no attempt. A key that is claimed again after it has
-- expired loses its stored data.
ON CONFLICT (namespace, id) DO UPDATE SET
  token = excluded.token,
  lease_until = excluded.lease_until,
  attempts = CASE WHEN {is_own} THEN t.attempts WHEN t.expires_at <= {now} THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN {is_own} THEN t.takeover WHEN t.expires_at <= {now} THEN 0 ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN NOT {is_own} AND t.expires_at <= {now} THEN excluded.first_seen_at
    ELSE t.first_seen_at END,
  completed_at = excluded.completed_at,
  expires_at = excluded.expires_at,
  event_type = CASE WHEN NOT {is_own} AND t.expires_at <= {now} THEN excluded.event_type ELSE t.event_type END,
  payload_sha256 = excluded.payload_sha256,
  response_status = excluded.response_status,
  response_headers = excluded.response_headers,
  response_body = excluded.response_body
WHERE (t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= {now}))
  OR (t.completed_at IS NOT NULL AND t.expires_at <= {now})
  OR {is_own}
RETURNING namespace, id, attempts, takeover
