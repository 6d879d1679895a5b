-- Within a transaction, before its keys are completed: stores their data.
-- Not an UPDATE: if ANALYZE saw the table tiny, SQLite plans an UPDATE that reads every row, and
-- uses that plan after the table has grown. A CROSS JOIN fixes the order of the join.
INSERT INTO {table} AS t (
  namespace, id, attempts, takeover, first_seen_at, expires_at,
  payload_sha256, response_status, response_headers, response_body
)
SELECT e.namespace, e.id, 0, 0, 0, 0,
  unhex(value ->> 6), value ->> 7, value ->> 8, unhex(value ->> 9)
FROM json_each(?1)
CROSS JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
WHERE e.completed_at IS NULL AND e.token = unhex(value ->> 2)
ON CONFLICT (namespace, id) DO UPDATE SET
  payload_sha256 = excluded.payload_sha256,
  response_status = excluded.response_status,
  response_headers = excluded.response_headers,
  response_body = excluded.response_body
