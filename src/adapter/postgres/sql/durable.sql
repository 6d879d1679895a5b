-- `remote_apply` is stronger than `on` and stays. `local` and `remote_write` do not wait until a synchronous standby has
-- the commit on its disk.
CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
  THEN set_config('synchronous_commit', 'on', true) END
