-- Claims rows that no live lease holds, and missing rows, complete at once, with their stored data.
{claimed_rows}
ON CONFLICT (namespace, id) DO UPDATE SET
  token = excluded.token,
  lease_until = NULL,
  attempts = CASE WHEN t.expires_at <= {now} THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN t.expires_at <= {now} THEN 0 ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN t.expires_at <= {now} THEN excluded.first_seen_at
    ELSE t.first_seen_at END,
  completed_at = excluded.completed_at,
  expires_at = excluded.expires_at,
  event_type = CASE WHEN t.expires_at > {now} THEN t.event_type ELSE excluded.event_type END,
  payload_sha256 = excluded.payload_sha256,
  response_status = excluded.response_status,
  response_headers = excluded.response_headers,
  response_body = excluded.response_body
WHERE (t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= {now}))
  OR (t.completed_at IS NOT NULL AND t.expires_at <= {now})
RETURNING namespace, id, attempts, takeover
