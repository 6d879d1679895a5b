-- Reads rows with the SHA-256 of their payloads. Responses are not read.
SELECT j.key AS ordinal, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, {now} AS now, t.payload_sha256
FROM json_each(?1) AS j
CROSS JOIN {table} AS t ON t.namespace = j.value ->> 0 AND t.id = j.value ->> 1
