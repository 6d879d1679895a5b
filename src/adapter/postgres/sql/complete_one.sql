-- Completes keys, whoever holds them, and inserts missing rows. Returns the rows that it wrote.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no
-- attempts: that shows that it was inserted. A row that was complete before is not written again.
-- After a rerun was allowed, only the key's holder completes it: an earlier handler may still run.
-- `expires_at` stays unless the row has expired: the retention counts from the claim.
-- One key, as plain values: it costs as much as a plain INSERT.
-- Postgres evaluates the WHERE of the subquery before it writes the row, and set_config() takes effect
-- then. `IS NOT NULL` and `IS DISTINCT FROM ''` are always true: they only force the evaluation.
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT a.key, a.namespace, a.id, a.token, NULL, 0, false,
  clock_timestamp(), clock_timestamp(), clock_timestamp() + a.retention, a.event_type,
  a.payload_sha256, a.response_status, a.response_headers, a.response_body
FROM (
  SELECT $1::uuid AS key, $2::text AS namespace, $3::text AS id, $4::uuid AS token,
    $5::int8 * interval '1 millisecond' AS retention,
    $7::bytea AS payload_sha256, $8::int2 AS response_status,
    $9::text AS response_headers, $10::bytea AS response_body,
    $11::text AS event_type
  WHERE set_config('lock_timeout', $6::text, true) IS NOT NULL
    AND ({durable}) IS DISTINCT FROM ''
) AS a
ON CONFLICT (key) DO UPDATE SET
  completed_at = excluded.completed_at,
  lease_until = NULL,
  token = CASE WHEN t.completed_at IS NULL THEN t.token ELSE excluded.token END,
  attempts = CASE WHEN t.completed_at IS NULL THEN t.attempts ELSE 0 END,
  takeover = t.completed_at IS NULL AND t.takeover,
  first_seen_at = CASE WHEN t.completed_at IS NULL THEN t.first_seen_at
    ELSE excluded.first_seen_at END,
  expires_at = CASE WHEN t.expires_at <= clock_timestamp() THEN excluded.expires_at
    ELSE t.expires_at END,
  event_type = CASE WHEN t.completed_at IS NULL THEN t.event_type ELSE excluded.event_type END,
  rerun_at = CASE WHEN t.completed_at IS NULL THEN t.rerun_at END,
  rerun_by = CASE WHEN t.completed_at IS NULL THEN t.rerun_by END,
  rerun_reason = CASE WHEN t.completed_at IS NULL THEN t.rerun_reason END,
  payload_sha256 = excluded.payload_sha256,
  response_status = excluded.response_status,
  response_headers = excluded.response_headers,
  response_body = excluded.response_body
WHERE t.completed_at IS NULL AND (t.rerun_at IS NULL OR t.token = excluded.token)
  OR t.expires_at <= clock_timestamp()
RETURNING t.key, t.attempts, t.token
