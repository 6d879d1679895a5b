-- Sets the handler's role again: its deferred constraints are checked by the COMMIT.
SELECT WHERE CASE WHEN coalesce(current_setting('tower_dedup.role', true), '') <> ''
  THEN set_config('role', current_setting('tower_dedup.role'), true) END = ''
