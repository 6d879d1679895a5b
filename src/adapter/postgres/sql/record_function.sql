-- Makes the function that records a key in a transaction of another driver, in the schema of the table.
--
-- The body names the table with the schema in which the table stands now: not where a caller's `search_path` leads.
-- `enable_seqscan`: a session keeps the plan that it made for a small table while the table grows.
DECLARE
  place text := (
    SELECT quote_ident(n.nspname) || '.'
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid = {table_literal}::regclass
  );
BEGIN
  EXECUTE format($create$
CREATE OR REPLACE FUNCTION %s(namespace text, id text, retention_seconds double precision)
RETURNS text LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '{lock_timeout}'
SET enable_seqscan = off
AS %L
$create$, place || {function_name}, format($body$
{body}
$body$, place || {table_name}));
END
