-- For each advisory lock in `$1`: whether no session holds it.
--
-- The locks are looked up, not tried: a lock that is held for a moment would hide a free key, and
-- takes an entry in the server's lock table. A lock of one 64-bit number is shown in two halves, and
-- `objsubid` is 1.
SELECT held.lock IS NULL AS free
FROM unnest($1::int8[]) WITH ORDINALITY AS a (lock, ordinal)
LEFT JOIN (
  SELECT DISTINCT l.classid::int8 << 32 | l.objid::int8 AS lock
  FROM pg_locks AS l
  WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
) AS held ON held.lock = a.lock # {table_number}::oid::int8
ORDER BY a.ordinal
