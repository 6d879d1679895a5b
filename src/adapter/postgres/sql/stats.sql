-- Counts rows by their states: the {counted} rows that expired first, and the {counted} rows that expire last. These
-- are all rows unless one of the two parts is full.
--
-- OFFSET 0 has the state of a row computed once, not once a column. The states are numbers because
-- comparing texts takes three times as long.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
)
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
  )) FILTER (WHERE state = 5)) * 1000)::int8,
  greatest(
    count(*) FILTER (WHERE expires_at <= now), count(*) FILTER (WHERE expires_at > now)
  ) < {counted} AS is_exact
FROM (
  SELECT c.now, t.lease_until, t.first_seen_at, t.completed_at, t.expires_at, {state} AS state
  FROM clock AS c, (
    (
      SELECT token, lease_until, first_seen_at, completed_at, expires_at FROM {table}
      WHERE expires_at <= (SELECT now FROM clock) ORDER BY expires_at LIMIT {counted}
    )
    UNION ALL
    (
      SELECT token, lease_until, first_seen_at, completed_at, expires_at FROM {table}
      WHERE expires_at > (SELECT now FROM clock) ORDER BY expires_at DESC LIMIT {counted}
    )
  ) AS t
  OFFSET 0
) AS rows
