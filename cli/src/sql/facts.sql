-- The facts of the server, and of the table $1 of the schema $2, or of the search path, with its partitions: one
-- JSON object. Every role may read them.
WITH RECURSIVE found AS (
  SELECT c.oid, c.relnamespace, v.oid AS version
  FROM pg_class AS c
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_class AS v
    ON v.relnamespace = n.oid AND v.relname = $1 || '_schema' AND v.relkind IN ('r', 'p')
  WHERE c.relname = $1 AND c.relkind IN ('r', 'p')
    AND CASE WHEN $2::text IS NULL THEN pg_table_is_visible(c.oid) ELSE n.nspname = $2 END
), part(oid) AS (
  SELECT oid FROM found
  UNION ALL SELECT i.inhrelid FROM pg_inherits AS i JOIN part AS p ON i.inhparent = p.oid
), facts AS (
  SELECT
    oid::regclass::text AS name,
    concat_ws(', ',
      CASE WHEN NOT has_schema_privilege(relnamespace, 'USAGE') THEN 'USAGE on the schema' END,
      CASE WHEN NOT has_table_privilege(oid, 'SELECT') THEN 'SELECT' END,
      CASE WHEN NOT has_table_privilege(oid, 'INSERT') THEN 'INSERT' END,
      CASE WHEN NOT has_table_privilege(oid, 'UPDATE') THEN 'UPDATE' END,
      CASE WHEN NOT has_table_privilege(version, 'SELECT') THEN 'SELECT on the version table' END
    ) AS lacks,
    has_table_privilege(oid, 'DELETE') AS may_delete,
    (SELECT bool_or(r.relpersistence <> 'p') FROM part AS p JOIN pg_class AS r ON r.oid = p.oid)
      AS is_unlogged,
    EXISTS (
      SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
      WHERE i.indrelid = found.oid AND a.attname = 'expires_at' AND i.indisvalid AND i.indpred IS NULL
    ) AS has_index
  FROM found
), server AS (
  SELECT
    pg_is_in_recovery() AS is_standby,
    current_setting('transaction_read_only') = 'on' AS is_read_only,
    current_setting('fsync') = 'on' AS fsync,
    current_setting('full_page_writes') = 'on' AS full_page_writes,
    (SELECT s.ssl FROM pg_stat_ssl AS s WHERE s.pid = pg_backend_pid()) AS tls,
    inet_client_addr() IS NULL OR inet_client_addr() <<= '127.0.0.0/8'
      OR inet_client_addr() = '::1' AS is_local,
    (SELECT to_json(facts) FROM facts) AS table
)
SELECT to_json(server)::text FROM server
