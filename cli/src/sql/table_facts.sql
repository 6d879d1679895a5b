-- The facts of the table with the number $1, or of its partitions, as one JSON object.
WITH RECURSIVE part(oid) AS (
  SELECT $1::bigint::oid
  UNION ALL SELECT i.inhrelid FROM pg_inherits AS i JOIN part AS p ON i.inhparent = p.oid
)
SELECT to_json(f)::text FROM (
  SELECT
    has_schema_privilege(c.relnamespace, 'USAGE') AS may_use_schema,
    has_table_privilege(c.oid, 'SELECT') AS may_select,
    has_table_privilege(c.oid, 'INSERT') AS may_insert,
    has_table_privilege(c.oid, 'UPDATE') AS may_update,
    has_table_privilege(c.oid, 'DELETE') AS may_delete,
    coalesce((
      SELECT has_table_privilege(v.oid, 'SELECT') FROM pg_class AS v
      WHERE v.relnamespace = c.relnamespace AND v.relname = c.relname || '_schema'
    ), true) AS may_select_version,
    (SELECT bool_or(r.relpersistence <> 'p') FROM part AS p JOIN pg_class AS r ON r.oid = p.oid)
      AS is_unlogged,
    EXISTS (
      SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
      WHERE i.indrelid = c.oid AND a.attname = 'expires_at'
    ) AS has_index
  FROM pg_class AS c
  WHERE c.oid = $1::bigint::oid
) AS f
