-- Moves the lease of rows that their token holds, and inserts missing rows. Returns those, and the rows that open
-- transactions hold: they are passed over.
-- Rows are locked and inserted in the order of `key`, so that two batches never deadlock.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '100ms', true) AS lock_timeout,
    CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN set_config('synchronous_commit', 'on', true) END AS durability,
    $5::int8 * interval '1 millisecond' AS retention, $7::int8 * interval '1 millisecond' AS lease
), locked AS MATERIALIZED (
  SELECT t.key FROM {table} AS t WHERE t.key = ANY ($1::uuid[]) ORDER BY t.key FOR UPDATE SKIP LOCKED
), locked_by_others AS MATERIALIZED (
  SELECT t.key FROM {table} AS t
  WHERE t.key = ANY ($1::uuid[]) AND NOT EXISTS (SELECT FROM locked AS l WHERE l.key = t.key)
), renewed AS (
  INSERT INTO {table} AS t (
    key, namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at, event_type
  )
  SELECT a.key, a.namespace, a.id, a.token, a.now + a.lease, 1, false, a.now, a.now + a.retention, a.event_type
  FROM (
    SELECT a.*, s.retention, s.lease, clock_timestamp() AS now
    FROM settings AS s, unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $6::text[])
      AS a (key, namespace, id, token, event_type)
    WHERE NOT EXISTS (SELECT FROM locked_by_others AS l WHERE l.key = a.key)
  ) AS a
  ORDER BY a.key
  ON CONFLICT (key) DO UPDATE SET version = t.version + 1, lease_until = excluded.lease_until
  -- A release leaves a row without a lease, which no renewal revives. A complete row with one waits for its response.
  WHERE t.token = excluded.token AND t.lease_until IS NOT NULL
    AND (t.completed_at IS NULL OR t.response_status IS NULL)
  RETURNING t.key
)
SELECT key, false AS is_locked FROM renewed
UNION ALL
SELECT key, true FROM locked_by_others
