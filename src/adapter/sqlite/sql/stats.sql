-- Counts rows by their states: the 100000 rows that expired first, and the 100000 rows that expire last. These
-- are all rows unless one of the two parts is full.
SELECT count(*) AS rows,
  count(*) FILTER (WHERE state = 'in-flight') AS in_flight,
  count(*) FILTER (WHERE state = 'lapsed') AS lapsed,
  count(*) FILTER (WHERE state = 'released') AS released,
  count(*) FILTER (WHERE state = 'complete') AS complete,
  count(*) FILTER (WHERE state = 'expired') AS expired,
  max(now - first_seen_at) FILTER (WHERE state = 'in-flight') AS oldest_in_flight,
  max(now - lease_until) FILTER (WHERE state = 'lapsed') AS oldest_lapsed,
  -- An incomplete key expires with its lease, if that ends later.
  max(now - max(expires_at, iif(completed_at IS NULL, coalesce(lease_until, 0), 0)))
    FILTER (WHERE state = 'expired') AS oldest_expired,
  max(count(*) FILTER (WHERE expires_at <= now), count(*) FILTER (WHERE expires_at > now)) < 100000
    AS is_exact
FROM (
  SELECT *, CASE
      WHEN completed_at IS NULL AND token IS NOT NULL AND lease_until > now THEN 'in-flight'
      WHEN expires_at <= now THEN 'expired'
      WHEN completed_at IS NOT NULL THEN 'complete'
      WHEN token IS NOT NULL THEN 'lapsed'
      ELSE 'released'
    END AS state
  FROM (
    SELECT * FROM (
      SELECT (SELECT {now}) AS now, token, lease_until, first_seen_at, completed_at, expires_at
      FROM {table}
      WHERE expires_at <= (SELECT {now})
      ORDER BY expires_at
      LIMIT 100000
    )
    UNION ALL
    SELECT * FROM (
      SELECT (SELECT {now}) AS now, token, lease_until, first_seen_at, completed_at, expires_at
      FROM {table}
      WHERE expires_at > (SELECT {now})
      ORDER BY expires_at DESC
      LIMIT 100000
    )
  )
)
