-- Moves the lease of rows that their token holds, and inserts missing rows. Returns those.
-- One key, as plain values: it costs as much as a plain INSERT.
-- Postgres evaluates the WHERE of the subquery before it writes the row, and set_config() takes effect
-- then. `IS NOT NULL` and `IS DISTINCT FROM ''` are always true: they only force the evaluation.
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type
)
SELECT a.key, a.namespace, a.id, a.token, clock_timestamp() + a.lease, 1, false,
  clock_timestamp(), NULL, clock_timestamp() + a.retention, a.event_type
FROM (
  SELECT $1::uuid AS key, $2::text AS namespace, $3::text AS id, $4::uuid AS token,
    $5::int8 * interval '1 millisecond' AS retention,
    $7::int8 * interval '1 millisecond' AS lease,
    $8::text AS event_type
  WHERE set_config('lock_timeout', $6::text, true) IS NOT NULL
    AND ({durable}) IS DISTINCT FROM ''
) AS a
ON CONFLICT (key) DO UPDATE SET version = t.version + 1, lease_until = excluded.lease_until
-- A release leaves a row without a lease, which no renewal revives.
WHERE t.completed_at IS NULL AND t.token = excluded.token AND t.lease_until IS NOT NULL
RETURNING t.key
