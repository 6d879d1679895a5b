-- Claims rows that no live lease holds, complete at once, with their stored data.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {durable} AS durability
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key, a.token, a.retention, a.event_type,
    a.payload_sha256, a.response_status, a.response_headers, a.response_body
  FROM (
    SELECT a.key, a.namespace, a.id, a.token,
      a.retention * interval '1 millisecond' AS retention, a.event_type,
      a.payload_sha256, a.response_status, a.response_headers, a.response_body
    FROM settings, unnest(
      $1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[],
      $7::bytea[], $8::int2[], $9::text[], $10::bytea[], $11::text[]
    ) AS a (
      key, namespace, id, token, retention,
      payload_sha256, response_status, response_headers, response_body, event_type
    )
  ) AS a
  JOIN {table} AS t ON t.key = a.key
  WHERE (
      t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= clock_timestamp())
      OR t.completed_at IS NOT NULL AND t.expires_at <= clock_timestamp()
    )
  ORDER BY t.key
  FOR UPDATE OF t
)
UPDATE {table} AS t SET
  token = l.token,
  lease_until = NULL,
  attempts = CASE WHEN t.expires_at <= clock_timestamp() THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN t.expires_at <= clock_timestamp() THEN false
    ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN t.expires_at <= clock_timestamp() THEN clock_timestamp()
    ELSE t.first_seen_at END,
  completed_at = clock_timestamp(),
  expires_at = clock_timestamp() + l.retention,
  event_type = CASE WHEN t.expires_at > clock_timestamp() THEN t.event_type
    ELSE l.event_type END,
  payload_sha256 = l.payload_sha256, response_status = l.response_status,
  response_headers = l.response_headers, response_body = l.response_body
FROM locked AS l
WHERE t.key = l.key
RETURNING t.key, t.attempts, t.takeover
