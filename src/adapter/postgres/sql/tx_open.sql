-- Within a transaction that claims no key: names the session, and returns which transaction it is.
--
-- `$1` is the lock that names the session. A server in recovery returns 25006, as to an insertion.
SELECT pg_current_xact_id()::text AS xid, current_setting('role') AS role,
  pg_try_advisory_xact_lock($1::int8) AS named
