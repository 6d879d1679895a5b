-- Within a transaction: claims rows that no live lease holds.
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
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key, a.token, a.retention, a.lease, a.event_type
  FROM asked AS a
  JOIN {table} AS t ON t.key = a.key
  WHERE (
      t.completed_at IS NULL
        AND (t.lease_until IS NULL OR t.lease_until <= clock_timestamp() OR t.token = a.token)
      OR t.completed_at IS NOT NULL AND t.expires_at <= clock_timestamp()
    )
  ORDER BY t.key
  FOR UPDATE OF t
), claimed AS (
  UPDATE {table} AS t SET
    version = t.version + 1,
    token = l.token,
    lease_until = clock_timestamp() + l.lease,
    -- A claim that is repeated with its token counts no attempt.
    attempts = CASE WHEN t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token THEN t.attempts
      WHEN t.expires_at <= clock_timestamp() THEN 1 ELSE t.attempts + 1 END,
    takeover = CASE WHEN t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token THEN t.takeover
      WHEN t.expires_at <= clock_timestamp() THEN false ELSE t.lease_until IS NOT NULL END,
    first_seen_at = CASE WHEN NOT (t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token)
        AND t.expires_at <= clock_timestamp() THEN clock_timestamp() ELSE t.first_seen_at END,
    completed_at = CASE WHEN l.lease IS NULL THEN clock_timestamp() END,
    expires_at = clock_timestamp() + l.retention,
    -- A key that is claimed again after it has expired loses its stored data.
    event_type = CASE WHEN t.expires_at > clock_timestamp()
        OR t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token
      THEN t.event_type ELSE l.event_type END,
    payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
  FROM locked AS l
  WHERE t.key = l.key
  RETURNING t.key, t.attempts, t.takeover
), written AS MATERIALIZED (
  SELECT count(*) AS rows FROM claimed
), restored AS MATERIALIZED (
  -- After the rows are written, the handler's `lock_timeout` is restored.
  SELECT set_config('lock_timeout', s.lock_timeout_before, true) AS lock_timeout,
    pg_current_xact_id()::text AS xid, s.role
  FROM settings AS s, written
  WHERE written.rows >= 0
)
-- The outer join evaluates `restored` even if no row was claimed: then the key is null.
SELECT s.key, s.attempts, s.takeover FROM restored LEFT JOIN claimed AS s ON true
