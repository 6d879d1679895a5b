-- Reads the {portion} rows after the key `$1`, and returns at most `$7` of them: those in the state `$2`, of the
-- namespace `$3`, first seen in the last `$4` milliseconds, with more attempts than `$5`, with ids that contain `$6`.
-- Null selects all. The last row of the portion is always returned, because the next portion begins after it.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, t.now, t.version,
  t.event_type, t.namespace, t.id, t.is_selected, t.number = {portion} AS is_last
FROM (
  SELECT t.*, (
      t.state <> 5 AND ($2::int4 IS NULL OR t.state = $2)
      AND ($3::text IS NULL OR t.namespace = $3)
      AND ($4::int8 IS NULL OR t.first_seen_at >= t.now - $4 * interval '1 millisecond')
      AND ($5::int8 IS NULL OR t.attempts > $5)
      AND ($6::text IS NULL OR position($6 IN t.id) > 0)
    ) AS is_selected
  FROM (
    SELECT t.*, c.now, {state} AS state, row_number() OVER (ORDER BY t.key) AS number
    FROM (SELECT clock_timestamp() AS now) AS c, (
      SELECT key, token, attempts, takeover, first_seen_at, completed_at, expires_at, lease_until, version,
        event_type, namespace, id
      FROM {table}
      WHERE key > $1
      ORDER BY key
      LIMIT {portion}
    ) AS t
  ) AS t
) AS t
WHERE t.is_selected OR t.number = {portion}
ORDER BY t.key
LIMIT $7
