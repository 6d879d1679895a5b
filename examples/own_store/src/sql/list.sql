-- Reads the rows after a key, in the order of the primary key. The WHERE is not `(namespace, id) > (?, ?)`, for which
-- MariaDB reads the whole index.
SELECT version, token, lease_until, attempts, takeover, first_seen_at, completed_at, expires_at, event_type,
  NULL AS payload_sha256, NULL AS response_status, NULL AS response_headers, NULL AS response_body,
  {start} AS now, namespace, id
FROM {table}
WHERE namespace > ? OR (namespace = ? AND id > ?)
ORDER BY namespace, id
LIMIT ?
