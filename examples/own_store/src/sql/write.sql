-- Writes a row at the version that was read: a claim takes it, a late completion completes it, an operator forgets it.
-- A write that is late finds another version, and changes nothing.
UPDATE {table} SET
  version = version + 1,
  token = ?, attempts = ?, takeover = ?, event_type = ?,
  payload_sha256 = ?, response_status = ?, response_headers = ?, response_body = ?,
  first_seen_at = IF(?, {handled_at}, first_seen_at),
  completed_at = IF(?, {handled_at}, NULL),
  lease_until = {now} + ?,
  expires_at = IF(? AND expires_at > {now}, expires_at, {handled_at} + ?)
WHERE namespace = ? AND id = ? AND version = ?
