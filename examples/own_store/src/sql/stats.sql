-- Counts rows by their states (`row.rs`): the {counted} rows that expired first, and the {counted} that expire last, which
-- were claimed last. These are all rows unless one of the two parts is full.
SELECT COUNT(*) AS counted,
  COUNT(IF(state = 1, 1, NULL)) AS in_flight,
  COUNT(IF(state = 2, 1, NULL)) AS lapsed,
  COUNT(IF(state = 3, 1, NULL)) AS released,
  COUNT(IF(state = 4, 1, NULL)) AS complete,
  COUNT(IF(state = 5, 1, NULL)) AS expired,
  MAX(IF(state = 1, now - first_seen_at, NULL)) AS oldest_in_flight,
  MAX(IF(state = 2, now - lease_until, NULL)) AS oldest_lapsed,
  -- An incomplete row expires with the later of its retention and its lease.
  MAX(IF(state = 5, now - GREATEST(expires_at, IF(completed_at IS NULL, COALESCE(lease_until, 0), 0)), NULL))
    AS oldest_expired,
  COUNT(IF(expires_at > now, NULL, 1)) < {counted} AND COUNT(IF(expires_at > now, 1, NULL)) < {counted} AS is_exact,
  (SELECT CAST(TABLE_ROWS AS SIGNED) FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '{name}')
    AS estimate,
  (SELECT CAST(DATA_LENGTH + INDEX_LENGTH AS SIGNED) FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '{name}') AS bytes
FROM (
  SELECT t.*, {start} AS now, CASE
      WHEN completed_at IS NULL AND token IS NOT NULL AND lease_until > {start} THEN 1
      WHEN expires_at <= {start} THEN 5
      WHEN completed_at IS NOT NULL THEN 4
      WHEN lease_until IS NOT NULL THEN 2
      ELSE 3
    END AS state
  FROM (
    (SELECT token, lease_until, first_seen_at, completed_at, expires_at FROM {table}
      WHERE expires_at <= {start} ORDER BY expires_at LIMIT {counted})
    UNION ALL
    (SELECT token, lease_until, first_seen_at, completed_at, expires_at FROM {table}
      WHERE expires_at > {start} ORDER BY expires_at DESC LIMIT {counted})
  ) AS t
) AS states
