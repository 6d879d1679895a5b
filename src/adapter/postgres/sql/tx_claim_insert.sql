-- Within a transaction: claims keys that have no row. Returns the result for every key.
--
-- Without a lease, it claims complete at once. `$7` are the events' types, `$8` the keys' parts of the advisory locks.
WITH settings AS MATERIALIZED (
  SELECT {handler_lock_timeout} AS lock_timeout_before,
    current_setting('role') AS role,
    set_config('lock_timeout', '{lock_timeout}', true) AS lock_timeout,
    {durable} AS durability,
    $5::int8 * interval '1 millisecond' AS retention,
    $6::int8 * interval '1 millisecond' AS lease
), asked AS MATERIALIZED (
  -- A lock is only tried for: its holder may be a handler.
  SELECT a.key, a.namespace, a.id, a.event_type, a.token, s.retention, s.lease,
    pg_try_advisory_xact_lock(a.lock # {table_number}::oid::int8) AS locked
  FROM settings AS s,
    unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $7::text[], $8::int8[])
      AS a (key, namespace, id, token, event_type, lock)
), inserted AS (
  INSERT INTO {table} AS t (
    key, namespace, id, token, lease_until, attempts, takeover,
    first_seen_at, completed_at, expires_at, event_type
  )
  SELECT a.key, a.namespace, a.id, a.token, clock_timestamp() + a.lease, 1, false,
    clock_timestamp(), CASE WHEN a.lease IS NULL THEN clock_timestamp() END,
    clock_timestamp() + a.retention, a.event_type
  FROM asked AS a
  WHERE a.locked
  ORDER BY a.key
  ON CONFLICT (key) DO NOTHING
  RETURNING t.key
), written AS MATERIALIZED (
  SELECT count(*) AS rows FROM inserted
), restored AS MATERIALIZED (
  -- After the rows are written, the handler's `lock_timeout` is restored.
  SELECT set_config('lock_timeout', s.lock_timeout_before, true) AS lock_timeout,
    pg_current_xact_id()::text AS xid, s.role
  FROM settings AS s, written
  WHERE written.rows >= 0
)
SELECT a.key, a.locked, i.key IS NOT NULL AS granted, r.xid, r.role
FROM asked AS a
CROSS JOIN restored AS r
LEFT JOIN inserted AS i ON i.key = a.key
