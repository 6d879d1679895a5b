-- Reads a row with all its stored data, on any server.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, clock_timestamp() AS now, t.version,
  t.event_type,
  t.payload_sha256, t.response_status::int8 AS response_status, t.response_headers,
  t.response_body
FROM {table} AS t
WHERE t.key = $1
