-- Deletes a row that no live lease holds.
DELETE FROM {table}
WHERE (namespace, id) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
  AND (completed_at IS NOT NULL OR token IS NULL OR lease_until <= {now})
