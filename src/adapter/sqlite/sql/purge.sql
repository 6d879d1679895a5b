-- Deletes at most `?1` rows that expired {grace_ms} milliseconds ago, the oldest first. A lease may outlive the
-- retention.
DELETE FROM {table}
WHERE (namespace, id) IN (
  SELECT namespace, id
  FROM {table}
  WHERE expires_at <= (SELECT {now}) - {grace_ms}
    AND (completed_at IS NOT NULL OR token IS NULL OR lease_until <= (SELECT {now}) - {grace_ms})
  ORDER BY expires_at
  LIMIT ?1
)
