-- Stores deliveries, sorted by key. A row that exists is due now, unless it runs.
WITH s AS MATERIALIZED (SELECT {durability} AS durability, set_config('lock_timeout', '200ms', true) AS lock_timeout)
INSERT INTO {table} AS r
  (key, service, namespace, keys, event_type, due, turn, format, method, target, headers, body, verified, answered)
SELECT a.key, $1::text, a.namespace, a.keys, a.event_type,
  clock_timestamp() + CASE WHEN a.turn IS NULL THEN 0 ELSE $2::int8 END * interval '1 millisecond',
  a.turn, {format}, a.method, a.target, a.headers, a.body, a.verified, a.turn IS NULL
FROM s, unnest($3::bytea[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bytea[], $9::bytea[], $10::bytea[],
  $11::text[], $12::bytea[]) AS a(key, namespace, keys, event_type, method, target, headers, body, verified, turn)
ON CONFLICT (key) DO UPDATE SET
  version = r.version + 1,
  answered = true,
  received = clock_timestamp(),
  due = CASE WHEN r.turn IS NULL THEN clock_timestamp() ELSE r.due END,
  parked = NULL,
  attempts = CASE WHEN r.parked IS NULL THEN r.attempts ELSE 0 END,
  deaths = CASE WHEN r.parked IS NULL THEN r.deaths ELSE 0 END,
  misrouted = CASE WHEN r.parked IS NULL THEN r.misrouted ELSE 0 END,
  verified = coalesce(excluded.verified, r.verified)
RETURNING r.key, r.seq, r.version
