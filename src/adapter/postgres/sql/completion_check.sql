-- Returns a row if this transaction has completed the events of `OwnCompletion::json`, and still is the one that
-- this crate began. The handler may have weakened `synchronous_commit` after the completion.
SELECT CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
  THEN pg_catalog.set_config('synchronous_commit', 'on', true) END
FROM pg_catalog.jsonb_to_record($1::text::jsonb) AS d (token uuid, mark text, events jsonb)
WHERE d.mark = pg_catalog.current_setting('tower_dedup.tx', true)
  AND NOT EXISTS (
    SELECT 1
    FROM (
      SELECT r.key
      FROM pg_catalog.jsonb_to_recordset(d.events) AS r (key uuid)
      LIMIT pg_catalog.jsonb_array_length(d.events)
    ) AS e
    LEFT JOIN {table} AS t ON t.key = e.key AND t.token = d.token AND t.completed_at IS NOT NULL
    WHERE t.key IS NULL
  )
