-- Moves the lease of the token, and revives a lapsed or missing row. A row without a lease is released: no renewal
-- revives it, because the renewal may be late. Returns the row as it is now.
--
-- MariaDB assigns from left to right: `lease_until` comes last, because the condition reads it.
INSERT INTO {table} (
  namespace, id, version, token, lease_until, attempts, takeover, first_seen_at, expires_at, event_type
) VALUES (?, ?, {version}, ?, {now} + ?, 1, FALSE, {now}, {now} + ?, ?)
ON DUPLICATE KEY UPDATE
  version = version + 1,
  lease_until = IF(
    token = ? AND completed_at IS NULL AND lease_until IS NOT NULL, {now} + ?, lease_until
  )
RETURNING token = ? AND completed_at IS NULL AND lease_until IS NOT NULL AS is_held
