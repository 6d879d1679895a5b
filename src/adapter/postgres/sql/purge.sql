-- Deletes at most `$1` expired rows, the oldest first. Returns their number, and no row if it has deleted none.
--
-- Rows that another statement has locked are skipped. So a purge waits for no row, and deadlocks with
-- no batch, although it locks rows in another order. A lease may outlive the retention. The hour is `PURGE_GRACE`.
-- The clock is read in a subquery, because an index needs one value. With an array, Postgres finds the rows by their
-- key whatever it expects of their number.
WITH purged AS (
  DELETE FROM {table}
  WHERE key = ANY (ARRAY(
    SELECT t.key
    FROM {table} AS t
    WHERE t.expires_at <= (SELECT clock_timestamp() - interval '1 hour')
      AND (t.completed_at IS NOT NULL OR t.lease_until IS NULL
        OR t.lease_until <= (SELECT clock_timestamp() - interval '1 hour'))
    ORDER BY t.expires_at
    LIMIT $1
    FOR UPDATE SKIP LOCKED
  ))
  RETURNING 1
)
SELECT count(*) FROM purged HAVING count(*) > 0
