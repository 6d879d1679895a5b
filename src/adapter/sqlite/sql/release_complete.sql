-- Undoes claims that were complete at once: deletes the complete rows of these tokens.
DELETE FROM {table}
WHERE (namespace, id) IN (
  SELECT e.namespace, e.id
  FROM json_each(?1)
  CROSS JOIN {table} AS e ON e.namespace = value ->> 0 AND e.id = value ->> 1
  WHERE e.token = unhex(value ->> 2) AND e.completed_at IS NOT NULL
)
RETURNING namespace, id
