-- Claims keys that have no row.
-- Returns no rows: their number is all that the common case needs, and to hand rows from SQLite's
-- thread to the caller's costs as much as to write them.
INSERT INTO {table} AS t (
  namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at, event_type
)
SELECT value ->> 0, value ->> 1, unhex(value ->> 2), {now} + (value ->> 4), 1, 0,
  {now}, {now} + (value ->> 3), value ->> 5
FROM json_each(?1)
WHERE true
ON CONFLICT (namespace, id) DO NOTHING
