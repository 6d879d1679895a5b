-- Completes keys, whoever holds them, and inserts missing rows. Returns the rows that it wrote.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no
-- attempts: that shows that it was inserted. So has a row that only a release has made. A row that was complete
-- before is not written again, unless the same token adds a response to a row without one, or ends the wait for one.
-- `expires_at` stays unless the row has expired: the retention counts from the claim.
{settings}{pass_locked}
{complete_rows}
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
  payload_sha256 = excluded.payload_sha256,
  response_status = excluded.response_status,
  response_headers = excluded.response_headers,
  response_body = excluded.response_body
WHERE t.completed_at IS NULL OR t.expires_at <= clock_timestamp()
  OR t.token = excluded.token AND t.response_status IS NULL
    AND (excluded.response_status IS NOT NULL OR t.lease_until IS NOT NULL)
RETURNING t.key, t.attempts, t.token
