-- Writes a row at the version that was read: a claim takes it, a late completion completes it, an operator forgets it.
-- A write that is late finds another version, and changes nothing.
UPDATE {table} SET
  version = version + 1,
  token = ?,
  lease_until = {now} + ?,
  attempts = ?,
  takeover = ?,
  first_seen_at = IF(?, {now}, first_seen_at),
  completed_at = IF(?, IF(?, {now}, COALESCE(completed_at, {now})), NULL),
  expires_at = IF(? AND expires_at > {now}, expires_at, {now} + ?),
  event_type = IF(?, ?, event_type),
  payload_sha256 = ?, response_status = ?, response_headers = ?, response_body = ?
WHERE namespace = ? AND id = ? AND version = ?
