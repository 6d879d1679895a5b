-- Makes a row expire, unless a live lease holds it. It stays, because a deleted row could be revived by a renewal.
INSERT INTO {table} AS t (namespace, id, attempts, takeover, first_seen_at, expires_at)
SELECT e.namespace, e.id, 0, 0, {now}, {now}
FROM json_each(?1)
CROSS JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
WHERE e.completed_at IS NOT NULL OR e.token IS NULL OR e.lease_until <= {now}
ON CONFLICT (namespace, id) DO UPDATE SET
  token = NULL, lease_until = NULL, attempts = 0, takeover = 0, completed_at = NULL,
  first_seen_at = excluded.first_seen_at, expires_at = excluded.expires_at, event_type = NULL,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
