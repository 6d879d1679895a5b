-- `remote_apply` is stronger than `on` and stays. `local` and `remote_write` do not wait until a synchronous standby has
-- the commit on its disk.
CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
  THEN pg_catalog.set_config('synchronous_commit', 'on', true) END
