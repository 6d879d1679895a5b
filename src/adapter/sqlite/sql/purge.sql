-- Deletes at most `?1` rows that expired an hour ago (`PURGE_GRACE`), the oldest first. A lease may outlive the
-- retention.
DELETE FROM {table}
WHERE (namespace, id) IN (
  SELECT namespace, id
  FROM {table}
  WHERE expires_at <= (SELECT {now}) - 3600000
    AND (completed_at IS NOT NULL OR token IS NULL OR lease_until <= (SELECT {now}) - 3600000)
  ORDER BY expires_at
  LIMIT ?1
)
