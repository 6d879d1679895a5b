-- Looked for first: IF NOT EXISTS needs the right to create even where the schema exists.
DO $$ BEGIN IF to_regnamespace({schema_literal}) IS NULL
THEN CREATE SCHEMA {schema}; END IF; END $$
