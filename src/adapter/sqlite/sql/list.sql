-- Reads rows that have not expired: from the key (`?1`, `?2`) to the last key before (`?3`, `?4`), the
-- first `?8` of them. They are in the state `?5`, were first seen within `?6` milliseconds, and have more
-- than `?7` attempts. A null selects every row.
SELECT namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, lease_until,
  now, event_type
FROM (
  SELECT *, {state} AS state
  FROM (
    SELECT (SELECT {now}) AS now, namespace, id, token, attempts, takeover, first_seen_at,
      completed_at, expires_at, lease_until, event_type
    FROM {table}
    WHERE (namespace, id) >= (?1, ?2) AND (namespace, id) < (?3, ?4)
  )
)
WHERE state <> 'expired'
  AND (?5 IS NULL OR state = ?5)
  AND (?6 IS NULL OR first_seen_at >= now - ?6)
  AND (?7 IS NULL OR attempts > ?7)
ORDER BY namespace, id
LIMIT ?8
