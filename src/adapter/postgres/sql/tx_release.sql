-- Within a transaction: leaves keys as a rollback would. Rows that this claim inserted are deleted.
-- Rows that it took have one attempt less; after a takeover the next claim is a takeover again.
WITH inserted AS (
  DELETE FROM {table}
  WHERE key = ANY ({keys}) AND token = '{token}' AND completed_at IS NULL AND attempts = 1
)
UPDATE {table} SET
  attempts = attempts - 1,
  token = CASE WHEN takeover THEN token END,
  lease_until = CASE WHEN takeover THEN clock_timestamp() END
WHERE key = ANY ({keys}) AND token = '{token}' AND completed_at IS NULL AND attempts > 1
