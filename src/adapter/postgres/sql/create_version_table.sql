CREATE TABLE IF NOT EXISTS {version_table} (version integer NOT NULL)
