-- Finds the table: its schema, or the schema in which to make it; whether it exists with its
-- version table; whether it has an index on `expires_at`; the database's encoding.
SELECT f.schema,
  f.there AND to_regclass(quote_ident(f.schema) || {version_name}) IS NOT NULL AS there,
  EXISTS (
    SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = f.number AND a.attname = 'expires_at' AND i.indisvalid AND i.indpred IS NULL
  ) AS has_index,
  current_setting('server_encoding') AS encoding
FROM (
  SELECT coalesce(n.nspname::text, {schema}) AS schema, c.oid IS NOT NULL AS there, c.oid AS number
  FROM (SELECT) AS one
  LEFT JOIN pg_class AS c ON c.oid = {table_number}
  LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
) AS f
