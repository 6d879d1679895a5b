-- Claims rows that no live lease holds, and those that the caller's own token holds.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', $6::text, true) AS lock_timeout, {claim_durable} AS durability
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key, a.token, a.retention, a.lease, a.event_type
  FROM (
    SELECT a.key, a.namespace, a.id, a.token,
      a.retention * interval '1 millisecond' AS retention,
      a.lease * interval '1 millisecond' AS lease, a.event_type
    FROM settings, unnest(
      $1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[], $7::int8[], $8::text[]
    ) AS a (
      key, namespace, id, token, retention, lease, event_type
    )
  ) AS a
  JOIN {table} AS t ON t.key = a.key
  WHERE (
      t.completed_at IS NULL
        AND (t.token IS NULL OR t.lease_until <= clock_timestamp() OR t.token = a.token)
      OR t.completed_at IS NOT NULL AND t.expires_at <= clock_timestamp()
    )
  ORDER BY t.key
  FOR UPDATE OF t
)
UPDATE {table} AS t SET
  token = l.token,
  lease_until = clock_timestamp() + l.lease,
  -- A claim that is repeated with its token counts no attempt.
  attempts = CASE WHEN t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token THEN t.attempts
    WHEN t.expires_at <= clock_timestamp() THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token THEN t.takeover
    WHEN t.expires_at <= clock_timestamp() THEN false ELSE t.token IS NOT NULL END,
  first_seen_at = CASE WHEN NOT (t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token)
      AND t.expires_at <= clock_timestamp() THEN clock_timestamp() ELSE t.first_seen_at END,
  completed_at = NULL,
  expires_at = clock_timestamp() + l.retention,
  -- A key that is claimed again after it has expired loses its stored data.
  event_type = CASE WHEN t.expires_at > clock_timestamp()
      OR t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token
    THEN t.event_type ELSE l.event_type END,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
FROM locked AS l
WHERE t.key = l.key
RETURNING t.key, t.attempts, t.takeover
