-- Within a transaction: leaves rows that this claim has as a rollback would. They have one attempt less; after a takeover
-- the next claim is a takeover again. A row without attempts expires: it may have been inserted, or be that of a release.
UPDATE {table} SET
  version = version + 1,
  attempts = attempts - 1,
  token = CASE WHEN takeover THEN token END,
  lease_until = CASE WHEN takeover THEN clock_timestamp() END,
  expires_at = CASE WHEN attempts = 1 THEN clock_timestamp() ELSE expires_at END
WHERE key = ANY ({keys}) AND token = '{token}' AND completed_at IS NULL
