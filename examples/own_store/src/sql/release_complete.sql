-- Undoes a claim that was complete at once: the complete row of the token expires, without attempts and stored data.
-- Otherwise the fence of `release.sql`.
--
-- MariaDB assigns from left to right: `completed_at` comes last, because the conditions read it. The token stays, which
-- means nothing in an expired row without lease and attempts.
INSERT INTO {table} (namespace, id, version, attempts, takeover, first_seen_at, expires_at)
VALUES (?, ?, {version}, 0, FALSE, {now}, {now})
ON DUPLICATE KEY UPDATE
  version = version + 1,
  expires_at = IF(completed_at IS NOT NULL AND token = ?, {now}, GREATEST(expires_at, {now})),
  lease_until = IF(completed_at IS NOT NULL AND token = ?, NULL, lease_until),
  attempts = IF(completed_at IS NOT NULL AND token = ?, 0, attempts),
  takeover = IF(completed_at IS NOT NULL AND token = ?, FALSE, takeover),
  event_type = IF(completed_at IS NOT NULL AND token = ?, NULL, event_type),
  payload_sha256 = IF(completed_at IS NOT NULL AND token = ?, NULL, payload_sha256),
  response_status = IF(completed_at IS NOT NULL AND token = ?, NULL, response_status),
  response_headers = IF(completed_at IS NOT NULL AND token = ?, NULL, response_headers),
  response_body = IF(completed_at IS NOT NULL AND token = ?, NULL, response_body),
  completed_at = IF(completed_at IS NOT NULL AND token = ?, NULL, completed_at)
