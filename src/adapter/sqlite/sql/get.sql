-- Reads rows with all their stored data.
SELECT j.key AS ordinal, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, {now} AS now, t.event_type,
  t.payload_sha256, t.response_status, t.response_headers, t.response_body
FROM json_each(?1) AS j
CROSS JOIN {table} AS t ON t.namespace = j.value ->> 0 AND t.id = j.value ->> 1
