-- The settings of a lent transaction. They end with it.
--
-- A claim may wait for a lock on the table before it sets its own `lock_timeout`; the handler's is noted.
-- If this machine vanishes, the server ends the session after about 25 s, and not after its own keepalives
-- (2 hours). `{idle_ms}` is for a session whose peer is a proxy that stays up; 0 is no bound. A shorter time
-- of the server's stays.
SELECT set_config('tower_dedup.lock_timeout', s.handlers, true),
  set_config('lock_timeout', '{lock_timeout}', true),
  set_config('tcp_keepalives_idle', '10', true),
  set_config('tcp_keepalives_interval', '5', true),
  set_config('tcp_keepalives_count', '3', true),
  -- A handler that was dropped may have left a statement that waits for a lock. Other systems refuse it.
  CASE WHEN current_setting('client_connection_check_interval', true) = '0' AND version() LIKE '%linux%'
    THEN set_config('client_connection_check_interval', '2000', true) END,
  set_config('idle_in_transaction_session_timeout', s.idle, true)
FROM (
  SELECT current_setting('lock_timeout') AS handlers,
    coalesce(extract(epoch FROM least(
      nullif(current_setting('idle_in_transaction_session_timeout')::interval, interval '0'),
      nullif({idle_ms} * interval '1 millisecond', interval '0')
    )) * 1000, 0)::int8::text AS idle
  OFFSET 0
) AS s
