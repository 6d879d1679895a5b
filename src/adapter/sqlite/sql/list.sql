-- Reads the 10000 rows after the key (`?1`, `?2`) and before the namespace `?3`, and returns at most `?8` of them:
-- those in the state `?4`, first seen within `?5` milliseconds, with more than `?6` attempts, with ids that contain
-- `?7`. Null selects all. The last row of the portion is always returned, because the next portion begins after it.
SELECT namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, lease_until,
  now, event_type, is_selected, number = 10000 AS is_last
FROM (
  SELECT *, row_number() OVER (ORDER BY namespace, id) AS number,
    state <> 'expired'
      AND (?4 IS NULL OR state = ?4)
      AND (?5 IS NULL OR first_seen_at >= now - ?5)
      AND (?6 IS NULL OR attempts > ?6)
      AND (?7 IS NULL OR instr(id, ?7) > 0) AS is_selected
  FROM (
    SELECT *, CASE
        WHEN completed_at IS NULL AND token IS NOT NULL AND lease_until > now THEN 'in-flight'
        WHEN expires_at <= now THEN 'expired'
        WHEN completed_at IS NOT NULL THEN 'complete'
        WHEN token IS NOT NULL THEN 'lapsed'
        ELSE 'released'
      END AS state
    FROM (
      SELECT (SELECT {now}) AS now, namespace, id, token, attempts, takeover, first_seen_at,
        completed_at, expires_at, lease_until, event_type
      FROM {table}
      WHERE (namespace, id) > (?1, ?2) AND (namespace, id) < (?3, '')
      ORDER BY namespace, id
      LIMIT 10000
    )
  )
)
WHERE is_selected OR number = 10000
ORDER BY namespace, id
LIMIT ?8
