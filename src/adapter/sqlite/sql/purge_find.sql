-- Returns the first `?5` keys that can be purged: from (`?1`, `?2`) to the last key before (`?3`, `?4`).
SELECT namespace, id
FROM {table}
WHERE (namespace, id) >= (?1, ?2) AND (namespace, id) < (?3, ?4)
  AND {purgeable}
ORDER BY namespace, id
LIMIT ?5
