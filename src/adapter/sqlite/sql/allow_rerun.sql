-- Lets keys run again that no live lease holds: `?2` says who allows it, and `?3` why. Returns those.
--
-- The row has no token, so the next claim is no takeover; except after a lease that has lapsed.
-- `expires_at` is at least 7 days away, so that the sender can deliver the event again.
UPDATE {table} SET
  token = CASE WHEN completed_at IS NULL THEN token END,
  lease_until = CASE WHEN completed_at IS NULL THEN lease_until END,
  -- A completion without a claim has run the event once.
  attempts = max(attempts, 1),
  completed_at = NULL,
  expires_at = max(expires_at, {now} + 7 * 86400000),
  rerun_at = {now}, rerun_by = ?2, rerun_reason = ?3,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
WHERE (namespace, id) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
  AND expires_at > {now}
  AND (completed_at IS NOT NULL OR token IS NULL OR lease_until <= {now})
RETURNING namespace, id
