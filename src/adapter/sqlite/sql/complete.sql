-- Completes keys, whoever holds them, and inserts missing rows. Returns the rows that it wrote.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no
-- attempts: that shows that it was inserted. So has a row that only a release has made. A row that was complete before is
-- not written again, unless the same token adds a response to a row without one, or ends the wait for one.
INSERT INTO {table} AS t (
  namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), 0, 0,
  {now}, {now}, {now} + (value ->> 3), value ->> 5,
  unhex(value ->> 6), value ->> 7, value ->> 8, unhex(value ->> 9)
FROM json_each(?1)
WHERE true
ON CONFLICT (namespace, id) DO UPDATE SET
  completed_at = CASE WHEN t.expires_at > {now} THEN coalesce(t.completed_at, excluded.completed_at)
    ELSE excluded.completed_at END,
  lease_until = NULL,
  token = CASE WHEN t.completed_at IS NULL AND t.attempts > 0 THEN t.token ELSE excluded.token END,
  attempts = CASE WHEN t.completed_at IS NULL OR t.expires_at > {now} THEN t.attempts ELSE 0 END,
  takeover = CASE WHEN t.completed_at IS NULL OR t.expires_at > {now} THEN t.takeover ELSE 0 END,
  first_seen_at = CASE WHEN (t.completed_at IS NULL OR t.expires_at > {now}) AND t.attempts > 0 THEN t.first_seen_at
    ELSE excluded.first_seen_at END,
  expires_at = CASE WHEN t.expires_at <= {now} THEN excluded.expires_at ELSE t.expires_at END,
  event_type = CASE WHEN (t.completed_at IS NULL OR t.expires_at > {now}) AND t.attempts > 0 THEN t.event_type
    ELSE excluded.event_type END,
  payload_sha256 = excluded.payload_sha256, response_status = excluded.response_status,
  response_headers = excluded.response_headers, response_body = excluded.response_body
WHERE t.completed_at IS NULL OR t.expires_at <= {now}
  OR t.token = excluded.token AND t.response_status IS NULL
    AND (excluded.response_status IS NOT NULL OR t.lease_until IS NOT NULL)
RETURNING namespace, id, attempts, token
