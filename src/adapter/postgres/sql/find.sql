-- Finds the table: its schema, or the schema in which to make it; whether it exists with its
-- version table; whether it has an index on `expires_at`; the database's encoding; whether the session has the
-- `search_path` that it began with, and its transaction has written nothing.
SELECT f.schema,
  f.there AND to_regclass(quote_ident(f.schema) || {version_name}) IS NOT NULL AS there,
  EXISTS (
    SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = f.number AND a.attname = 'expires_at'
  ) AS has_index,
  current_setting('server_encoding') AS encoding,
  current_setting('search_path') IS NOT DISTINCT FROM (
    SELECT s.reset_val FROM pg_settings AS s WHERE s.name = 'search_path'
  ) AND pg_current_xact_id_if_assigned() IS NULL AS is_everybodys
FROM (
  SELECT coalesce(n.nspname::text, {schema}) AS schema, c.oid IS NOT NULL AS there, c.oid AS number
  FROM (SELECT) AS one
  LEFT JOIN pg_class AS c ON c.oid = {table_number}
  LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
) AS f
