-- The server's facts, as one JSON object. Every role may read them.
SELECT to_json(f)::text FROM (
  SELECT
    pg_is_in_recovery() AS is_standby,
    current_setting('transaction_read_only') = 'on' AS is_read_only,
    current_setting('fsync') = 'on' AS fsync,
    current_setting('full_page_writes') = 'on' AS full_page_writes,
    current_setting('max_connections')::bigint AS max_connections,
    current_setting('superuser_reserved_connections')::bigint
      + coalesce(current_setting('reserved_connections', true), '0')::bigint AS reserved,
    (SELECT count(*) FROM pg_stat_activity AS a, pg_roles AS r
      WHERE r.rolname = current_user AND a.datid IS NOT NULL AND a.usesysid <> r.oid) AS others,
    (SELECT count(*) FROM pg_stat_activity AS a, pg_roles AS r
      WHERE r.rolname = current_user AND a.datname = current_database() AND a.usesysid <> r.oid)
      AS database_others,
    (SELECT r.rolconnlimit FROM pg_roles AS r WHERE r.rolname = current_user) AS role_limit,
    (SELECT d.datconnlimit FROM pg_database AS d WHERE d.datname = current_database())
      AS database_limit,
    (SELECT s.ssl FROM pg_stat_ssl AS s WHERE s.pid = pg_backend_pid()) AS tls,
    inet_client_addr() IS NULL OR inet_client_addr() <<= '127.0.0.0/8'
      OR inet_client_addr() = '::1' AS is_local
) AS f
