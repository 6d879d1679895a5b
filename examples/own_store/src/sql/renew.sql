-- Moves the lease of the token, and revives a lapsed or missing row. A row without a lease is released: no renewal
-- revives it, because the renewal may be late. A complete row with a lease waits for its response. Returns the row as it
-- is now.
--
-- MariaDB assigns from left to right: `lease_until` comes last, because the condition reads it.
INSERT INTO {table} (
  namespace, id, token, event_type, lease_until, expires_at, version, attempts, takeover, first_seen_at
) VALUES (?, ?, ?, ?, {now} + ?, {now} + ?, {version}, 1, FALSE, {now})
ON DUPLICATE KEY UPDATE
  version = version + 1,
  lease_until = IF(
    token = VALUES(token) AND lease_until IS NOT NULL AND (completed_at IS NULL OR response_status IS NULL),
    {now} + ?, lease_until)
RETURNING token, lease_until IS NOT NULL AND (completed_at IS NULL OR response_status IS NULL) AS is_leased
