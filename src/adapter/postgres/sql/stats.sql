-- Counts rows by their states: the 100000 rows that expired first, and the 100000 rows that expire last. These
-- are all rows unless one of the two parts is full. `estimate` has the rows of the table as the catalogue estimates them
-- (-1 for a table that was never analyzed), and `bytes` is with indexes; of a partitioned table, of all partitions.
--
-- The state of a row is by the rules of `sql/row.rs`. OFFSET 0 has it computed once, not once a column. The states are
-- numbers because comparing texts takes three times as long.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
)
SELECT r.*, s.estimate, s.bytes
FROM (
  SELECT count(*) AS rows,
    count(*) FILTER (WHERE state = 1) AS in_flight,
    count(*) FILTER (WHERE state = 2) AS lapsed,
    count(*) FILTER (WHERE state = 3) AS released,
    count(*) FILTER (WHERE state = 4) AS complete,
    count(*) FILTER (WHERE state = 5) AS expired,
    floor(extract(epoch FROM max(now - first_seen_at) FILTER (WHERE state = 1)) * 1000)::int8 AS oldest_in_flight,
    floor(extract(epoch FROM max(now - lease_until) FILTER (WHERE state = 2)) * 1000)::int8 AS oldest_lapsed,
    floor(extract(epoch FROM max(now - greatest(
      expires_at, CASE WHEN completed_at IS NULL THEN lease_until END
    )) FILTER (WHERE state = 5)) * 1000)::int8 AS oldest_expired,
    greatest(count(*) FILTER (WHERE expires_at <= now), count(*) FILTER (WHERE expires_at > now)) < 100000 AS is_exact
  FROM (
    SELECT c.now, t.lease_until, t.first_seen_at, t.completed_at, t.expires_at, CASE
        WHEN t.completed_at IS NULL AND t.token IS NOT NULL AND t.lease_until > c.now THEN 1
        WHEN t.expires_at <= c.now THEN 5
        WHEN t.completed_at IS NOT NULL THEN 4
        WHEN t.lease_until IS NOT NULL THEN 2
        ELSE 3
      END AS state
    FROM clock AS c, (
      (
        SELECT token, lease_until, first_seen_at, completed_at, expires_at FROM {table}
        WHERE expires_at <= (SELECT now FROM clock) ORDER BY expires_at LIMIT 100000
      )
      UNION ALL
      (
        SELECT token, lease_until, first_seen_at, completed_at, expires_at FROM {table}
        WHERE expires_at > (SELECT now FROM clock) ORDER BY expires_at DESC LIMIT 100000
      )
    ) AS t
    OFFSET 0
  ) AS rows
) AS r, (
  SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::int8 AS estimate,
    coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 AS bytes
  FROM pg_class AS c
  WHERE c.oid IN (SELECT p.relid::oid FROM pg_partition_tree({table_number}) AS p UNION SELECT {table_number}::oid)
    AND c.relkind <> 'p'
) AS s
