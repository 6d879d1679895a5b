-- As `claim_insert.sql`. The rows are complete at once, with their stored data: now, or when the event of the past was
-- handled.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout,
    CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN set_config('synchronous_commit', 'on', true) END AS durability,
    $5::int8 * interval '1 millisecond' AS retention
)
INSERT INTO {table} AS t (
  key, namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT a.key, a.namespace, a.id, a.token, 1, false, a.now, a.now, a.now + a.retention, a.event_type,
  a.payload_sha256, a.response_status, a.response_headers, a.response_body
FROM (
  SELECT a.*, s.retention,
    least(clock_timestamp(), timestamptz 'epoch' + a.handled_at * interval '1 millisecond') AS now
  FROM settings AS s, unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $6::text[],
      $8::bytea[], $9::int2[], $10::text[], $11::bytea[], $12::int8[])
    AS a (key, namespace, id, token, event_type,
      payload_sha256, response_status, response_headers, response_body, handled_at)
  -- only to pass over rows:
  WHERE a.key <> ALL (ARRAY(SELECT key FROM {table} WHERE key = ANY ((SELECT $1::uuid[])::uuid[])))
  -- end
) AS a
ON CONFLICT (key) DO NOTHING
RETURNING t.key
