-- Completes rows that their tokens hold, with nothing to store.
-- Returns no rows: their number is all that the common case needs, and to hand rows from SQLite's
-- thread to the caller's costs as much as to write them.
-- Not an UPDATE: if ANALYZE saw the table tiny, SQLite plans an UPDATE that reads every row, and
-- uses that plan after the table has grown. A CROSS JOIN fixes the order of the join.
INSERT INTO {table} AS t (namespace, id, attempts, takeover, first_seen_at, expires_at)
SELECT e.namespace, e.id, 0, 0, 0, 0
FROM json_each(?1)
CROSS JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
WHERE e.completed_at IS NULL AND e.token = unhex(value ->> 2) AND e.expires_at > {now}
ON CONFLICT (namespace, id) DO UPDATE SET
  completed_at = {now}, lease_until = NULL,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
