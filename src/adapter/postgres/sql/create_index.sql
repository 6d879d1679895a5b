-- By this index a purge finds its rows, and statistics find the keys that expired first and those that expire last.
CREATE INDEX IF NOT EXISTS {index} ON {table} (expires_at)
