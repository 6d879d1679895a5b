-- Whether the advisory lock of a key was free. The lock ends with the statement; a transaction that claims the key in
-- this moment is in flight, and is tried again.
SELECT pg_try_advisory_xact_lock($1::int8 # {table_number}::oid::int8) AS free
