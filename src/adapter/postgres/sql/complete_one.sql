-- Completes keys, whoever holds them, and inserts missing rows. Returns the rows that it wrote.
-- One key, as plain values: it costs as much as a plain INSERT.
-- Postgres evaluates the WHERE of the subquery before it writes the row, and set_config() takes effect
-- then. `IS NOT NULL` and `IS DISTINCT FROM ''` are always true: they only force the evaluation.
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT a.key, a.namespace, a.id, a.token, NULL, 0, false,
  clock_timestamp(), clock_timestamp(), clock_timestamp() + a.retention, a.event_type,
  a.payload_sha256, a.response_status, a.response_headers, a.response_body
FROM (
  SELECT $1::uuid AS key, $2::text AS namespace, $3::text AS id, $4::uuid AS token,
    $5::int8 * interval '1 millisecond' AS retention,
    $7::bytea AS payload_sha256, $8::int2 AS response_status,
    $9::text AS response_headers, $10::bytea AS response_body,
    $11::text AS event_type
  WHERE set_config('lock_timeout', $6::text, true) IS NOT NULL
    AND ({durable}) IS DISTINCT FROM ''
) AS a
{complete_existing}
