-- Deletes at most `$3` expired rows of the blocks from `$1` to before `$2`; of a partitioned table, from
-- these blocks of every partition.
--
-- Rows are found and deleted by their place, so no index is read. Postgres 13 reads the whole table for
-- that, and later versions read these blocks only. The clock is read once, in a subquery.
-- Rows that another statement has locked are skipped. So a purge waits for no row, and deadlocks with
-- no batch, although it locks rows in another order. `key` names the partition.
WITH expired AS MATERIALIZED (
  SELECT t.ctid, t.key
  FROM {table} AS t
  WHERE t.ctid >= $1::text::tid AND t.ctid < $2::text::tid
    AND t.expires_at <= (SELECT clock_timestamp() - {grace_ms} * interval '1 millisecond')
    AND (
      t.completed_at IS NOT NULL
      OR t.lease_until IS NULL
      OR t.lease_until <= (SELECT clock_timestamp() - {grace_ms} * interval '1 millisecond')
    )
  LIMIT $3
  FOR UPDATE SKIP LOCKED
), purged AS (
  DELETE FROM {table} AS t
  USING expired AS e
  WHERE t.ctid = e.ctid AND t.key = e.key
  RETURNING 1
)
SELECT count(*) FROM purged
