-- Deletes the first `?1` rows that expired `?2` milliseconds since the Unix epoch or later.
DELETE FROM {table}
WHERE (namespace, id) IN (
  SELECT namespace, id
  FROM {table}
  WHERE expires_at >= ?2
    AND expires_at <= {now} - {grace_ms}
    AND (completed_at IS NOT NULL OR token IS NULL OR lease_until <= {now} - {grace_ms})
  ORDER BY expires_at
  LIMIT ?1
)
RETURNING expires_at
