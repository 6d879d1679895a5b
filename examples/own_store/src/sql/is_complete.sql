SELECT 1 AS is_complete FROM {table} WHERE namespace = ? AND id = ? AND token = ? AND completed_at IS NOT NULL
