-- Inserts the row of a key that has none.
--
-- NOT EXISTS reads no row that is locked, so that the statement waits for no row that a handler's transaction holds. It
-- waits for another insertion of the key, which is over in a moment.
SET STATEMENT innodb_lock_wait_timeout = 2 FOR
INSERT INTO {table} (
  namespace, id, token, attempts, takeover, event_type,
  payload_sha256, response_status, response_headers, response_body,
  version, first_seen_at, completed_at, lease_until, expires_at
)
SELECT ?, ?, ?, ?, FALSE, ?,
  ?, ?, ?, ?,
  {version}, {handled_at}, IF(?, {handled_at}, NULL), {now} + ?, {handled_at} + ?
FROM DUAL
WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE namespace = ? AND id = ?)
