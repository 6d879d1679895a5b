-- Counts rows by their states.
SELECT count(*),
  count(*) FILTER (WHERE state = 'in_flight'),
  count(*) FILTER (WHERE state = 'lapsed'),
  count(*) FILTER (WHERE state = 'released'),
  count(*) FILTER (WHERE state = 'complete'),
  count(*) FILTER (WHERE state = 'expired'),
  floor(extract(epoch FROM max(now - first_seen_at)
    FILTER (WHERE state = 'in_flight')) * 1000)::int8,
  floor(extract(epoch FROM max(now - lease_until) FILTER (WHERE state = 'lapsed')) * 1000)::int8,
  floor(extract(epoch FROM max(now - greatest(expires_at,
    CASE WHEN completed_at IS NULL THEN lease_until END))
    FILTER (WHERE state = 'expired')) * 1000)::int8,
  pg_total_relation_size({table_number})
FROM (
  SELECT now, lease_until, first_seen_at, completed_at, expires_at,
    CASE
      WHEN completed_at IS NULL AND token IS NOT NULL AND lease_until > now THEN 'in_flight'
      WHEN expires_at <= now THEN 'expired'
      WHEN completed_at IS NOT NULL THEN 'complete'
      WHEN token IS NOT NULL THEN 'lapsed'
      ELSE 'released'
    END AS state
  FROM (SELECT clock_timestamp() AS now) AS clock, {table}
) AS rows
