-- Reads rows with the SHA-256 of their payloads. Responses are not read: large values are stored
-- apart, and a column that is not named is not fetched.
-- `standby` shows whether the server only follows another: it may not know yet, or know too much.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, clock_timestamp() AS now, t.version,
  pg_is_in_recovery() AS standby, t.payload_sha256
FROM {table} AS t
WHERE t.key = ANY ($1::uuid[])
