coalesce(nullif(current_setting('tower_dedup.lock_timeout', true), ''), current_setting('lock_timeout'))
