-- Counts the rows of the blocks from `$1` to before `$2` by their states; of a partitioned table, in every
-- partition.
--
-- OFFSET 0 has the state of a row computed once, not once a column. The states are numbers because
-- comparing texts takes three times as long.
SELECT count(*),
  count(*) FILTER (WHERE state = 1),
  count(*) FILTER (WHERE state = 2),
  count(*) FILTER (WHERE state = 3),
  count(*) FILTER (WHERE state = 4),
  count(*) FILTER (WHERE state = 5),
  floor(extract(epoch FROM max(now - first_seen_at) FILTER (WHERE state = 1)) * 1000)::int8,
  floor(extract(epoch FROM max(now - lease_until) FILTER (WHERE state = 2)) * 1000)::int8,
  floor(extract(epoch FROM max(now - greatest(
    expires_at, CASE WHEN completed_at IS NULL THEN lease_until END
  )) FILTER (WHERE state = 5)) * 1000)::int8
FROM (
  SELECT c.now, t.lease_until, t.first_seen_at, t.completed_at, t.expires_at, {state} AS state
  FROM (SELECT clock_timestamp() AS now) AS c, {table} AS t
  WHERE t.ctid >= $1::text::tid AND t.ctid < $2::text::tid
  OFFSET 0
) AS rows
