-- Reads rows with all their stored data.
-- `standby` shows whether the server only follows another: it may not know yet, or know too much.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, clock_timestamp() AS now, t.version,
  pg_is_in_recovery() AS standby,
  t.payload_sha256, t.response_status::int8 AS response_status, t.response_headers,
  t.response_body
FROM {table} AS t
WHERE t.key = ANY ($1::uuid[])
