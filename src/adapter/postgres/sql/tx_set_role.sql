CASE WHEN current_setting('role') <> {role}
  THEN CASE WHEN set_config('tower_dedup.role', current_setting('role'), true) IS NOT NULL
  THEN set_config('role', {role}, true) END END
