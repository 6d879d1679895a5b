-- Releases rows of these tokens: incomplete rows that were claimed under a lease, with their attempts, and complete rows
-- that were claimed without one, which expire. A missing row becomes an expired one, which no renewal revives.
-- Not an UPDATE: if ANALYZE saw the table tiny, SQLite plans an UPDATE that reads every row, and
-- uses that plan after the table has grown. A LEFT JOIN fixes the order of the join.
INSERT INTO {table} AS t (namespace, id, attempts, takeover, first_seen_at, expires_at)
SELECT value ->> 0, value ->> 1, 0, 0, {now}, {now}
FROM json_each(?1)
LEFT JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
WHERE e.id IS NULL
  OR (e.token = unhex(value ->> 2) AND (e.completed_at IS NULL) = (value ->> 4 IS NOT NULL))
ON CONFLICT (namespace, id) DO UPDATE SET
  token = NULL, lease_until = NULL, completed_at = NULL,
  attempts = iif(t.completed_at IS NULL, t.attempts, 0),
  takeover = iif(t.completed_at IS NULL, t.takeover, 0),
  first_seen_at = iif(t.completed_at IS NULL, t.first_seen_at, excluded.first_seen_at),
  expires_at = iif(t.completed_at IS NULL, t.expires_at, excluded.expires_at),
  event_type = iif(t.completed_at IS NULL, t.event_type, NULL),
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
