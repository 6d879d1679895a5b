-- Completes the row that the token holds, also after its lease and its retention: the common case in one statement.
UPDATE {table} SET
  version = version + 1,
  completed_at = {now},
  lease_until = NULL,
  expires_at = IF(expires_at <= {now}, {now} + ?, expires_at),
  payload_sha256 = ?, response_status = ?, response_headers = ?, response_body = ?
WHERE namespace = ? AND id = ? AND token = ? AND completed_at IS NULL AND attempts > 0
