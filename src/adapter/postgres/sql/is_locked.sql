-- Whether a transaction holds the advisory lock of a key. The statement takes no lock itself: a transaction that claims
-- the key at the same moment must find it free.
SELECT EXISTS (
  SELECT FROM pg_locks
  WHERE locktype = 'advisory'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND classid::int8 << 32 | objid::int8 = $1::int8 # {table_number}::oid::int8
    AND objsubid = 1
    AND granted
) AS locked
