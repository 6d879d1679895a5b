-- Reads a row without a lock. A claim judges the row by the time of the server.
SELECT version, token, lease_until, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, IF(?, response_headers, NULL) AS response_headers,
  IF(?, response_body, NULL) AS response_body, {now} AS now
FROM {table}
WHERE namespace = ? AND id = ?
