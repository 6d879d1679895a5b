-- Releases a key that the token has claimed.
--
-- ARGV: 2 token, 3 '1' to release a row that is complete at once, '0' to release an incomplete row.
-- Replies: {0} released; {1} not held.
if not row or row.token ~= ARGV[2] or row.complete ~= (ARGV[3] == '1') then
  if force and not row then
    -- The first call may have deleted the row on another connection. `WAIT` waits for this write, which
    -- follows the first one.
    redis.call('SET', key, '', 'PX', 1000)
    redis.call('DEL', key)
  end
  return {1}
end
if row.complete and row.rerun == '' then
  redis.call('DEL', key)
  return {0}
end
-- The row stays, with its attempts and the audit of a rerun.
row.token = nil
row.complete = false
row.ends_at = 0
row.data_flags, row.data = 0, ''
write(row)
return {0}
