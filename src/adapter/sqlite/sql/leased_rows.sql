-- Inserts rows under a lease.
INSERT INTO {table} AS t (
  namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), {now} + (value ->> 4), 1, 0,
  {now}, NULL, {now} + (value ->> 3), value ->> 5
FROM json_each(?1)
WHERE true
