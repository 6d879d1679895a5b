-- Two processes that both find no table take turns. Any number will do, if it never changes. A crash of the server must
-- not remove a table that a process has found: the role of that process may lack the right to make it again.
SELECT pg_advisory_xact_lock(8389209352947822448),
  CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
    THEN set_config('synchronous_commit', 'on', true) END
