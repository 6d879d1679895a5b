-- Lets keys run again that no live lease holds: `$2` says who allows it, and `$3` why. Returns those.
-- A row that a transaction has locked is left out, because a handler may run it.
--
-- The row has no token, so the next claim is no takeover; except after a lease that has lapsed.
-- `expires_at` is at least 7 days away, so that the sender can deliver the event again.
WITH settings AS MATERIALIZED (
  SELECT {durable} AS durability
), locked AS MATERIALIZED (
  -- In the order of `key`: an UPDATE locks in any order.
  SELECT t.key
  FROM settings
  CROSS JOIN unnest($1::uuid[]) AS a (key)
  JOIN {table} AS t ON t.key = a.key
  WHERE t.expires_at > clock_timestamp()
    AND (t.completed_at IS NOT NULL OR t.token IS NULL OR t.lease_until <= clock_timestamp())
  ORDER BY t.key
  FOR UPDATE OF t SKIP LOCKED
)
UPDATE {table} AS t SET
  token = CASE WHEN t.completed_at IS NULL THEN t.token END,
  lease_until = CASE WHEN t.completed_at IS NULL THEN t.lease_until END,
  -- A completion without a claim has run the event once.
  attempts = greatest(t.attempts, 1),
  completed_at = NULL,
  expires_at = greatest(t.expires_at, clock_timestamp() + interval '7 days'),
  rerun_at = clock_timestamp(), rerun_by = $2, rerun_reason = $3,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
FROM locked AS l
WHERE t.key = l.key
RETURNING t.key
