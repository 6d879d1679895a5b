-- Deletes rows that expired an hour ago, the oldest first. It passes over rows that others hold, and waits for none. A row
-- is locked when it is read, so it is deleted as it was read. A lease may outlive the retention.
--
-- The time is that of the statement, because an index needs one value: SYSDATE is read again for each row.
DELETE t FROM {table} AS t JOIN (
  SELECT namespace, id FROM {table}
  WHERE expires_at <= {start} - {grace}
    AND (completed_at IS NOT NULL OR lease_until IS NULL OR lease_until <= {start} - {grace})
  ORDER BY expires_at
  LIMIT ?
  FOR UPDATE SKIP LOCKED
) AS purged ON t.namespace = purged.namespace AND t.id = purged.id
