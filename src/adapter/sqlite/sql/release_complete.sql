-- Undoes claims that were complete at once: the complete rows of these tokens expire. Otherwise as `release.sql`.
INSERT INTO {table} AS t (
  namespace, id, attempts, takeover, first_seen_at, expires_at
)
SELECT value ->> 0, value ->> 1, 0, 0, {now}, {now}
FROM json_each(?1)
LEFT JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
WHERE e.id IS NULL OR (e.completed_at IS NOT NULL AND e.token = unhex(value ->> 2))
ON CONFLICT (namespace, id) DO UPDATE SET
  token = NULL, lease_until = NULL, attempts = 0, takeover = 0, completed_at = NULL,
  first_seen_at = excluded.first_seen_at, expires_at = excluded.expires_at, event_type = NULL,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
RETURNING namespace, id
