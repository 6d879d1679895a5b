-- Within a transaction: completes its keys, as the last statement before COMMIT.
-- A completion must not be expired when it is written: the retention counts from the claim, and a
-- handler may run for longer.
UPDATE {table} SET
  completed_at = {now},
  lease_until = NULL,
  expires_at = CASE WHEN expires_at <= {now} THEN {now} + ?3 ELSE expires_at END
WHERE (namespace, id) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
  AND token = ?2 AND completed_at IS NULL
RETURNING namespace, id
