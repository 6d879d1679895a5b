-- Within a transaction: deletes the rows that this claim inserted, as a rollback would.
DELETE FROM {table}
WHERE (namespace, id) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
  AND token = ?2 AND completed_at IS NULL AND attempts = 1
RETURNING namespace, id
