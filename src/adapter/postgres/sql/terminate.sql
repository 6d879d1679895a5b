-- Terminates the session that holds the advisory lock `$1`, unless it commits, and the sessions of
-- this crate that have done nothing in a transaction without a write for `$2` milliseconds.
-- Returns how many commit, how many of the former and how many of the latter were terminated.
--
-- A session that waits for a synchronous standby commits: to terminate it would show a commit that
-- the standby does not have. A lock of one 64-bit number is shown in two halves, and `objsubid`
-- is 1.
WITH found AS MATERIALIZED (
  SELECT pid,
    pid IN (
      SELECT pid FROM pg_locks
      WHERE locktype = 'advisory' AND objsubid = 1
        AND (classid::int8 << 32 | objid::int8) = $1
    ) AS holds,
    coalesce(wait_event = 'SyncRep', false)
      OR coalesce(state = 'active' AND query = 'COMMIT', false) AS commits,
    coalesce(usename = session_user AND state = 'idle in transaction'
      AND query LIKE '{tag}%' AND backend_xid IS NULL
      AND state_change < clock_timestamp() - $2 * interval '1 millisecond', false) AS left_over
  FROM pg_stat_activity
  WHERE datname = current_database() AND pid <> pg_backend_pid()
)
SELECT count(*) FILTER (WHERE holds AND commits),
  count(CASE WHEN holds AND NOT commits THEN pg_terminate_backend(pid) END),
  count(CASE WHEN left_over AND NOT holds THEN pg_terminate_backend(pid) END)
FROM found
