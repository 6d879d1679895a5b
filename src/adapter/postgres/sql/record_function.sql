-- Records a key in the caller's transaction, for programs whose driver is not sqlx: complete at once. The rules are those
-- of `record_in`. State 1 is leased, 4 complete, 5 expired.
CREATE OR REPLACE FUNCTION {function}(namespace text, id text, retention_seconds double precision)
RETURNS text LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY INVOKER
SET search_path {search_path}
AS {body}
