-- Reads the 10000 rows after the key `$1`, and returns at most `$7` of them: those in the state `$2`, of the
-- namespace `$3`, first seen in the last `$4` milliseconds, with more attempts than `$5`, with ids that contain `$6`.
-- Null selects all. The last row of the portion is always returned, because the next portion begins after it.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, t.now, t.version,
  t.event_type, t.namespace, t.id, t.is_selected, t.number = 10000 AS is_last
FROM (
  SELECT t.*, (
      t.state <> 5 AND ($2::int4 IS NULL OR t.state = $2)
      AND ($3::text IS NULL OR t.namespace = $3)
      AND ($4::int8 IS NULL OR t.first_seen_at >= t.now - $4 * interval '1 millisecond')
      AND ($5::int8 IS NULL OR t.attempts > $5)
      AND ($6::text IS NULL OR position($6 IN t.id) > 0)
    ) AS is_selected
  FROM (
    -- The rules of `sql/row.rs`, at the time `c.now`.
    SELECT t.*, c.now, row_number() OVER (ORDER BY t.key) AS number, CASE
        WHEN t.completed_at IS NULL AND t.token IS NOT NULL AND t.lease_until > c.now THEN 1
        WHEN t.expires_at <= c.now THEN 5
        WHEN t.completed_at IS NOT NULL THEN 4
        WHEN t.lease_until IS NOT NULL THEN 2
        ELSE 3
      END AS state
    FROM (SELECT clock_timestamp() AS now) AS c, (
      SELECT key, token, attempts, takeover, first_seen_at, completed_at, expires_at, lease_until, version,
        event_type, namespace, id
      FROM {table}
      WHERE key > $1
      ORDER BY key
      LIMIT 10000
    ) AS t
  ) AS t
) AS t
WHERE t.is_selected OR t.number = 10000
ORDER BY t.key
LIMIT $7
