-- Deletes the keys that can still be purged: another call may have claimed them since they were found.
DELETE FROM {table}
WHERE (namespace, id) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
  AND {purgeable}
