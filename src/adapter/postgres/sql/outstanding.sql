-- Counts the statements of this crate that run for longer than `$2` milliseconds: their callers may
-- have stopped waiting. With `$1`, cancels those that have waited for a lock for longer than `$1`
-- milliseconds.
SELECT count(*) FILTER (
    WHERE query_start < clock_timestamp() - $2::int8 * interval '1 millisecond'),
  count(CASE WHEN wait_event_type = 'Lock'
    AND query_start < clock_timestamp() - $1::int8 * interval '1 millisecond'
    THEN pg_cancel_backend(pid) END)
FROM pg_stat_activity
WHERE datname = current_database() AND usename = session_user AND state = 'active'
  AND query LIKE '{tag}%' AND pid <> pg_backend_pid()
