-- Reads rows with all their stored data; as `read.sql`, unless `$2` allows any server.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, clock_timestamp() AS now, t.version,
  pg_is_in_recovery() AND NOT $2 AS standby, t.event_type,
  t.payload_sha256, t.response_status::int8 AS response_status, t.response_headers, t.response_body
FROM {table} AS t
WHERE t.key = ANY ($1::uuid[])
