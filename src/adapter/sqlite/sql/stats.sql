-- Counts rows by their states: from the key (`?1`, `?2`) to the last key before (`?3`, `?4`), the first
-- `?5` of them.
SELECT count(*) AS rows,
  count(*) FILTER (WHERE state = 'in-flight') AS in_flight,
  count(*) FILTER (WHERE state = 'lapsed') AS lapsed,
  count(*) FILTER (WHERE state = 'failed') AS released,
  count(*) FILTER (WHERE state = 'complete') AS complete,
  count(*) FILTER (WHERE state = 'expired') AS expired,
  max(now - first_seen_at) FILTER (WHERE state = 'in-flight') AS oldest_in_flight,
  max(now - lease_until) FILTER (WHERE state = 'lapsed') AS oldest_lapsed,
  -- An incomplete key expires with its lease, if that ends later.
  max(now - max(expires_at, iif(completed_at IS NULL, coalesce(lease_until, 0), 0)))
    FILTER (WHERE state = 'expired') AS oldest_expired
FROM (
  SELECT now, lease_until, first_seen_at, completed_at, expires_at, {state} AS state
  FROM (
    SELECT (SELECT {now}) AS now, token, lease_until, first_seen_at, completed_at, expires_at
    FROM {table}
    WHERE (namespace, id) >= (?1, ?2) AND (namespace, id) < (?3, ?4)
    ORDER BY namespace, id
    LIMIT ?5
  )
)
