-- Moves the lease of rows that their token holds, and inserts missing rows. A complete row with a lease waits for its
-- response.
INSERT INTO {table} AS t (
  namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at, event_type
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), {now} + (value ->> 4), 1, 0,
  {now}, {now} + (value ->> 3), value ->> 5
FROM json_each(?1)
WHERE true
ON CONFLICT (namespace, id) DO UPDATE SET lease_until = excluded.lease_until
WHERE t.token IS excluded.token
  AND (t.completed_at IS NULL OR (t.lease_until IS NOT NULL AND t.response_status IS NULL))
RETURNING namespace, id
