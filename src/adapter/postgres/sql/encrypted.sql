-- Whether this connection is encrypted, on its last hop to the server.
SELECT s.ssl FROM pg_stat_ssl AS s WHERE s.pid = pg_backend_pid()
