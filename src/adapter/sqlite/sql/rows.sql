-- Inserts rows, under a lease or complete with their stored data.
INSERT INTO {table} AS t (
  namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type{data}
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), {lease_until}, {attempts}, 0,
  {now}, {completed_at}, {now} + (value ->> 3), value ->> 5{values}
FROM json_each(?1)
WHERE true
