-- As `claim_insert.sql`. The rows are complete at once, with their stored data.
INSERT INTO {table} AS t (
  namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), 1, 0,
  {now}, {now}, {now} + (value ->> 3), value ->> 5,
  unhex(value ->> 6), value ->> 7, value ->> 8, unhex(value ->> 9)
FROM json_each(?1)
WHERE true
ON CONFLICT (namespace, id) DO NOTHING
