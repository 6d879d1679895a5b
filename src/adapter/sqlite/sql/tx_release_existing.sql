-- Within a transaction: leaves the rows that this claim took as a rollback would. They have one
-- attempt less; after a takeover the next claim is a takeover again.
UPDATE {table} SET
  attempts = attempts - 1,
  token = CASE WHEN takeover THEN token END,
  lease_until = CASE WHEN takeover THEN {now} END
WHERE (namespace, id) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
  AND token = ?2 AND completed_at IS NULL AND attempts > 1
RETURNING namespace, id
