CREATE INDEX IF NOT EXISTS {index} ON {table} (expires_at)
