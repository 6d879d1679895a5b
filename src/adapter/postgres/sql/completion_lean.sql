-- Completes one event, as the last statement of a transaction that this crate began. The parameters are key, token,
-- mark, and the retention in milliseconds. It refuses by writing no row: the caller rolls back.
--
-- The settings stand in the WHERE and not in a CTE, which would cost a tenth of the rate. They are for this transaction,
-- and only where its user has set none. RETURNING sets `lock_timeout` back: nobody else chooses this value.
UPDATE {table} AS t SET
  version = t.version + 1,
  token = $2::uuid,
  completed_at = pg_catalog.clock_timestamp(),
  lease_until = NULL,
  expires_at = CASE WHEN t.expires_at <= pg_catalog.clock_timestamp()
    THEN pg_catalog.clock_timestamp() + $4::bigint * interval '1 millisecond' ELSE t.expires_at END,
  payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
WHERE t.key = $1::uuid
  AND t.completed_at IS NULL
  AND pg_catalog.current_setting('tower_dedup.tx', true) = $3::text
  AND (pg_catalog.current_setting('synchronous_commit') NOT IN ('off', 'local', 'remote_write')
    OR pg_catalog.set_config('synchronous_commit', 'on', true) IS NOT NULL)
  AND (pg_catalog.current_setting('lock_timeout') <> '0'
    OR pg_catalog.set_config('lock_timeout', '1999ms', true) IS NOT NULL)
RETURNING CASE WHEN pg_catalog.current_setting('lock_timeout') = '1999ms'
  THEN pg_catalog.set_config('lock_timeout', '0', true) END
