-- Deletes the first `$1` rows that expired `$2` milliseconds since the Unix epoch or later.
--
-- The clock is read once, in a subquery, so that the index on `expires_at` is used. Rows that
-- another purge is deleting are skipped.
WITH expired AS MATERIALIZED (
  SELECT key
  FROM {table}
  WHERE expires_at >= to_timestamp($2::float8 / 1000)
    AND expires_at <= (SELECT clock_timestamp() - {grace_ms} * interval '1 millisecond')
    AND (
      completed_at IS NOT NULL
      OR token IS NULL
      OR lease_until <= clock_timestamp() - {grace_ms} * interval '1 millisecond'
    )
  ORDER BY expires_at
  LIMIT $1
  FOR UPDATE SKIP LOCKED
), purged AS (
  DELETE FROM {table} AS t
  USING expired AS e
  WHERE t.key = e.key
  RETURNING t.expires_at
)
SELECT count(*), floor(extract(epoch FROM max(expires_at)) * 1000)::int8 FROM purged
