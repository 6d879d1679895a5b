-- Returns the key that follows `?5` keys: from (`?1`, `?2`) to the last key before (`?3`, `?4`).
SELECT namespace, id
FROM {table}
WHERE (namespace, id) >= (?1, ?2) AND (namespace, id) < (?3, ?4)
ORDER BY namespace, id
LIMIT 1 OFFSET ?5
