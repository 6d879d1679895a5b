-- The server's facts, as one JSON object. Every role may read them.
SELECT to_json(f)::text FROM (
  SELECT
    pg_is_in_recovery() AS is_standby,
    current_setting('transaction_read_only') = 'on' AS is_read_only,
    current_setting('fsync') = 'on' AS fsync,
    current_setting('full_page_writes') = 'on' AS full_page_writes,
    (SELECT s.ssl FROM pg_stat_ssl AS s WHERE s.pid = pg_backend_pid()) AS tls,
    inet_client_addr() IS NULL OR inet_client_addr() <<= '127.0.0.0/8'
      OR inet_client_addr() = '::1' AS is_local
) AS f
