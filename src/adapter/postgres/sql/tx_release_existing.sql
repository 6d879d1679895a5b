-- Within a transaction: leaves rows that this claim took as a rollback would. They have one attempt
-- less; after a takeover the next claim is a takeover again.
UPDATE {table} SET
  attempts = attempts - 1,
  token = CASE WHEN takeover THEN token END,
  lease_until = CASE WHEN takeover THEN clock_timestamp() END
WHERE key = ANY ({keys}) AND token = '{token}' AND completed_at IS NULL AND attempts > 1
