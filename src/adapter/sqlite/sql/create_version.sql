INSERT INTO {version_table} (version)
SELECT {version} WHERE NOT EXISTS (SELECT 1 FROM {version_table})
