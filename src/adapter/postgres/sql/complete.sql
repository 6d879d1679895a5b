-- Completes keys, whoever holds them, and inserts missing rows. Returns the rows that it wrote.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no
-- attempts: that shows that it was inserted. So has a row that only a release has made. A row that was complete
-- before is not written again, unless the same token adds a response to a row without one, or ends the wait for one.
-- `expires_at` stays unless the row has expired: the retention counts from the claim.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout,
    CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN set_config('synchronous_commit', 'on', true) END AS durability,
    $5::int8 * interval '1 millisecond' AS retention
-- only to pass over rows:
), locked AS MATERIALIZED (
  SELECT t.key FROM {table} AS t WHERE t.key = ANY ($1::uuid[]) ORDER BY t.key FOR UPDATE SKIP LOCKED
), locked_by_others AS MATERIALIZED (
  SELECT t.key FROM {table} AS t
  WHERE t.key = ANY ($1::uuid[]) AND NOT EXISTS (SELECT FROM locked AS l WHERE l.key = t.key)
-- end
)
INSERT INTO {table} AS t (
  key, namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT a.key, a.namespace, a.id, a.token, 0, false, a.now, a.now, a.now + a.retention, a.event_type,
  a.payload_sha256, a.response_status, a.response_headers, a.response_body
FROM (
  SELECT a.*, s.retention, clock_timestamp() AS now
  FROM settings AS s, unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $6::text[],
      $8::bytea[], $9::int2[], $10::text[], $11::bytea[])
    AS a (key, namespace, id, token, event_type,
      payload_sha256, response_status, response_headers, response_body)
  -- only to pass over rows:
  WHERE NOT EXISTS (SELECT FROM locked_by_others AS l WHERE l.key = a.key)
  -- end
) AS a
ON CONFLICT (key) DO UPDATE SET
  version = t.version + 1,
  completed_at = CASE WHEN t.expires_at > clock_timestamp() THEN coalesce(t.completed_at, excluded.completed_at)
    ELSE excluded.completed_at END,
  lease_until = NULL,
  token = CASE WHEN t.completed_at IS NULL AND t.attempts > 0 THEN t.token ELSE excluded.token END,
  attempts = CASE WHEN t.completed_at IS NULL OR t.expires_at > clock_timestamp() THEN t.attempts ELSE 0 END,
  takeover = (t.completed_at IS NULL OR t.expires_at > clock_timestamp()) AND t.takeover,
  first_seen_at = CASE WHEN (t.completed_at IS NULL OR t.expires_at > clock_timestamp()) AND t.attempts > 0
    THEN t.first_seen_at ELSE excluded.first_seen_at END,
  expires_at = CASE WHEN t.expires_at <= clock_timestamp() THEN excluded.expires_at
    ELSE t.expires_at END,
  event_type = CASE WHEN (t.completed_at IS NULL OR t.expires_at > clock_timestamp()) AND t.attempts > 0
    THEN t.event_type ELSE excluded.event_type END,
  payload_sha256 = excluded.payload_sha256, response_status = excluded.response_status,
  response_headers = excluded.response_headers, response_body = excluded.response_body
WHERE t.completed_at IS NULL OR t.expires_at <= clock_timestamp()
  OR t.token = excluded.token AND t.response_status IS NULL
    AND (excluded.response_status IS NOT NULL OR t.lease_until IS NOT NULL)
RETURNING t.key, t.attempts, t.token
