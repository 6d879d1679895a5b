-- The catalogue is read before anything is created: CREATE TABLE IF NOT EXISTS needs the right to
-- write even where the table exists.
SELECT count(*) FROM sqlite_schema
WHERE type IN ('table', 'index') AND name IN ('{name}', '{name}_schema', '{name}_expires_at')
