-- Releases the lease of the token. The row stays, without token and with its attempts.
--
-- This is the fence, and every part of it has its reason:
-- - one statement: between an UPDATE that finds no row and an INSERT, a late claim would insert its row;
-- - an insertion where there is no row: else a late claim would insert it. The row has expired, so it claims nothing;
-- - a raised version also of a row of others: else a late claim would take a free row at the version that it has read;
-- - `expires_at` at now or later: a purge takes rows an hour after it, and the fence must stay for that hour.
--
-- MariaDB assigns from left to right: `token` comes last, because the conditions read it. An inserted row has the token,
-- so that VALUES names it, and no lease, so that it is nobody's.
INSERT INTO {table} (namespace, id, token, version, attempts, takeover, first_seen_at, expires_at)
VALUES (?, ?, ?, {version}, 0, FALSE, {now}, {now})
ON DUPLICATE KEY UPDATE
  version = version + 1,
  expires_at = GREATEST(expires_at, {now}),
  lease_until = IF(completed_at IS NULL AND token = VALUES(token), NULL, lease_until),
  token = IF(completed_at IS NULL AND token = VALUES(token), NULL, token)
