-- Returns a row if this transaction has completed the events of `OwnCompletion::json`.
SELECT 1
WHERE NOT EXISTS (
  SELECT 1
  FROM json_each(?1, '$.events') AS e
  LEFT JOIN {table} AS t ON t.namespace = e.value ->> 0 AND t.id = e.value ->> 1
    AND t.token = unhex(?1 ->> '$.token') AND t.completed_at IS NOT NULL
  WHERE t.id IS NULL
)
