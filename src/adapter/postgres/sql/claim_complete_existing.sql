-- Takes rows that were free, at the versions that were read: complete at once, with their stored data.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{lock_timeout}', true) AS lock_timeout, {durable} AS durability,
    $5::int8 * interval '1 millisecond' AS retention
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key, a.token, a.retention, a.event_type,
    a.payload_sha256, a.response_status, a.response_headers, a.response_body,
    t.expires_at <= clock_timestamp() AS is_expired
  FROM (
    SELECT a.key, a.token, s.retention, a.event_type,
      a.payload_sha256, a.response_status, a.response_headers, a.response_body, a.version
    FROM settings AS s, unnest(
      $1::uuid[], $4::uuid[],
      $6::bytea[], $7::int2[], $8::text[], $9::bytea[], $10::text[], $11::int8[]
    ) AS a (
      key, token,
      payload_sha256, response_status, response_headers, response_body, event_type, version
    )
  ) AS a
  JOIN {table} AS t ON t.key = a.key
  WHERE t.version = a.version
  ORDER BY t.key
  FOR UPDATE OF t
)
UPDATE {table} AS t SET
  version = t.version + 1,
  token = l.token,
  lease_until = NULL,
  attempts = CASE WHEN l.is_expired THEN 1 ELSE t.attempts + 1 END,
  takeover = NOT l.is_expired AND t.lease_until IS NOT NULL,
  first_seen_at = CASE WHEN l.is_expired THEN clock_timestamp() ELSE t.first_seen_at END,
  completed_at = clock_timestamp(),
  expires_at = clock_timestamp() + l.retention,
  event_type = CASE WHEN l.is_expired THEN l.event_type ELSE t.event_type END,
  payload_sha256 = l.payload_sha256, response_status = l.response_status,
  response_headers = l.response_headers, response_body = l.response_body
FROM locked AS l
WHERE t.key = l.key
RETURNING t.key, t.attempts, t.takeover
