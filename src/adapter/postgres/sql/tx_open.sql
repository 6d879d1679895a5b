-- Within a transaction that claims no key: returns which transaction it is, and restores the handler's
-- `lock_timeout`. A server in recovery returns 25006, as to an insertion.
SELECT pg_current_xact_id()::text AS xid, current_setting('role') AS role,
  set_config('lock_timeout', s.handlers, true) AS lock_timeout
FROM (SELECT {handler_lock_timeout} AS handlers) AS s
