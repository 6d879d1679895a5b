-- Completes keys, whoever holds them, and inserts missing rows. Returns the rows that it wrote.
-- Rows are inserted in the order of the arrays.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no
-- attempts: that shows that it was inserted. So has a row that only a release has made. A row that was complete
-- before is not written again.
-- `expires_at` stays unless the row has expired: the retention counts from the claim.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout, {durable} AS durability,
    $5::int8 * interval '1 millisecond' AS retention
){pass_held}
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT a.key, a.namespace, a.id, a.token, NULL, 0, false,
  a.now, a.now, a.now + a.retention, a.event_type,
  a.payload_sha256, a.response_status, a.response_headers, a.response_body
FROM (
  SELECT a.key, a.namespace, a.id, a.token, s.retention, a.event_type,
    a.payload_sha256, a.response_status, a.response_headers, a.response_body,
    clock_timestamp() AS now
  FROM settings AS s, unnest(
    $1::uuid[], $2::text[], $3::text[], $4::uuid[],
    $6::bytea[], $7::int2[], $8::text[], $9::bytea[], $10::text[]
  ) AS a (
    key, namespace, id, token,
    payload_sha256, response_status, response_headers, response_body, event_type
  ){pass_unless_held}
) AS a
ON CONFLICT (key) DO UPDATE SET
  version = t.version + 1,
  completed_at = excluded.completed_at,
  lease_until = NULL,
  token = CASE WHEN t.completed_at IS NULL AND t.attempts > 0 THEN t.token ELSE excluded.token END,
  attempts = CASE WHEN t.completed_at IS NULL THEN t.attempts ELSE 0 END,
  takeover = t.completed_at IS NULL AND t.takeover,
  first_seen_at = CASE WHEN t.completed_at IS NULL AND t.attempts > 0 THEN t.first_seen_at
    ELSE excluded.first_seen_at END,
  expires_at = CASE WHEN t.expires_at <= clock_timestamp() THEN excluded.expires_at
    ELSE t.expires_at END,
  event_type = CASE WHEN t.completed_at IS NULL AND t.attempts > 0 THEN t.event_type ELSE excluded.event_type END,
  payload_sha256 = excluded.payload_sha256,
  response_status = excluded.response_status,
  response_headers = excluded.response_headers,
  response_body = excluded.response_body
WHERE t.completed_at IS NULL OR t.expires_at <= clock_timestamp()
RETURNING t.key, t.attempts, t.token
