-- The table $1 of the schema $2, or of the search path.
SELECT c.oid::bigint AS oid, n.nspname::text AS schema,
  EXISTS (
    SELECT FROM pg_class AS v
    WHERE v.relnamespace = n.oid AND v.relname = $1 || '_schema' AND v.relkind IN ('r', 'p')
  ) AS has_version
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = $1 AND c.relkind IN ('r', 'p')
  AND CASE WHEN $2::text IS NULL THEN pg_table_is_visible(c.oid) ELSE n.nspname = $2 END
