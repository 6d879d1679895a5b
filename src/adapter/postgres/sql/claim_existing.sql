-- Takes rows at the versions that were read: rows that were free then, and those of the caller's own token. Without a
-- lease, they are complete at once, with their stored data. A row at its version that an open transaction holds is
-- passed over, and returned without attempts.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout,
    CASE WHEN NOT {durable_claims} AND $7::int8 IS NOT NULL AND current_setting('synchronous_standby_names') = ''
      THEN set_config('synchronous_commit', 'off', true)
      WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN set_config('synchronous_commit', 'on', true) END AS durability,
    $5::int8 * interval '1 millisecond' AS retention, $7::int8 * interval '1 millisecond' AS lease
), calls AS MATERIALIZED (
  SELECT a.*, s.retention, s.lease, CASE WHEN a.handled_at IS NOT NULL
    THEN least(clock_timestamp(), timestamptz 'epoch' + a.handled_at * interval '1 millisecond') END AS past
  FROM settings AS s, unnest($1::uuid[], $4::uuid[], $6::text[],
      $8::bytea[], $9::int2[], $10::text[], $11::bytea[], $12::int8[], $13::int8[])
    AS a (key, token, event_type,
      payload_sha256, response_status, response_headers, response_body, handled_at, version)
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order. A claim that is repeated with its token counts no attempt.
  SELECT a.*, t.expires_at <= clock_timestamp() AS is_expired,
    a.lease IS NOT NULL AND t.token = a.token AND t.completed_at IS NULL AND t.lease_until IS NOT NULL AS is_own
  FROM calls AS a
  JOIN {table} AS t ON t.key = a.key
  WHERE t.version = a.version
  ORDER BY t.key
  FOR UPDATE OF t SKIP LOCKED
), taken AS (
  UPDATE {table} AS t SET
    version = t.version + 1,
    token = l.token,
    lease_until = clock_timestamp() + l.lease,
    attempts = CASE WHEN l.is_own THEN t.attempts WHEN l.is_expired THEN 1 ELSE t.attempts + 1 END,
    takeover = CASE WHEN l.is_own THEN t.takeover ELSE NOT l.is_expired AND t.lease_until IS NOT NULL END,
    first_seen_at = CASE WHEN l.is_expired AND l.is_own IS NOT TRUE THEN coalesce(l.past, clock_timestamp())
      ELSE t.first_seen_at END,
    completed_at = CASE WHEN l.lease IS NULL THEN coalesce(l.past, clock_timestamp()) END,
    expires_at = coalesce(l.past, clock_timestamp()) + l.retention,
    -- A key that is claimed again after it has expired loses its stored data.
    event_type = CASE WHEN l.is_expired AND l.is_own IS NOT TRUE THEN l.event_type ELSE t.event_type END,
    payload_sha256 = l.payload_sha256, response_status = l.response_status,
    response_headers = l.response_headers, response_body = l.response_body
  FROM locked AS l
  WHERE t.key = l.key
  RETURNING t.key, t.attempts, t.takeover
)
SELECT key, attempts, takeover FROM taken
UNION ALL
SELECT a.key, NULL, NULL
FROM calls AS a JOIN {table} AS t USING (key, version)
WHERE NOT EXISTS (SELECT FROM locked AS l WHERE l.key = a.key)
