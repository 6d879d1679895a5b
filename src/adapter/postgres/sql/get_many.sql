-- Reads rows without their stored data, on any server.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, clock_timestamp() AS now, t.version, t.event_type
FROM {table} AS t
WHERE t.key = ANY ($1::uuid[])
