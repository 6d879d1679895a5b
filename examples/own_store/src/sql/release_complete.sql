-- Undoes a claim that was complete at once: the complete row of the token is released and expires, without attempts.
-- Otherwise the fence of `release.sql`.
--
-- MariaDB assigns from left to right: `completed_at` comes last, because the conditions read it.
INSERT INTO {table} (namespace, id, token, version, attempts, takeover, first_seen_at, expires_at)
VALUES (?, ?, ?, {version}, 0, FALSE, {now}, {now})
ON DUPLICATE KEY UPDATE
  version = version + 1,
  expires_at = IF(completed_at IS NOT NULL AND token = VALUES(token), {now}, GREATEST(expires_at, {now})),
  lease_until = IF(completed_at IS NOT NULL AND token = VALUES(token), NULL, lease_until),
  attempts = IF(completed_at IS NOT NULL AND token = VALUES(token), 0, attempts),
  completed_at = IF(completed_at IS NOT NULL AND token = VALUES(token), NULL, completed_at)
