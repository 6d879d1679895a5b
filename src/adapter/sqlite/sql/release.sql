-- Releases the leases of these tokens. The rows stay, with their attempts. A missing row becomes an expired one, which
-- no renewal revives.
-- Not an UPDATE: if ANALYZE saw the table tiny, SQLite plans an UPDATE that reads every row, and
-- uses that plan after the table has grown. A LEFT JOIN fixes the order of the join.
INSERT INTO {table} AS t (
  namespace, id, attempts, takeover, first_seen_at, expires_at
)
SELECT value ->> 0, value ->> 1, 0, 0, {now}, {now}
FROM json_each(?1)
LEFT JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
WHERE e.id IS NULL OR (e.completed_at IS NULL AND e.token = unhex(value ->> 2))
ON CONFLICT (namespace, id) DO UPDATE SET
  token = NULL, lease_until = NULL
RETURNING namespace, id
