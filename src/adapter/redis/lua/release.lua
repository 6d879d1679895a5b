-- Releases a key that the token has claimed.
--
-- ARGV: 2 token, 3 '1' to release a row that is complete at once, '0' to release an incomplete row.
-- Replies: {0} released; {1} not held.
local reply = {0}
if token ~= ARGV[2] or complete ~= (ARGV[3] == '1') then
  reply = {1}
  -- An earlier attempt may have released the row on another connection. `WAIT` waits for this write, which
  -- follows that one.
  if not force or token then return reply end
  if not stored then
    redis.call('SET', key, '', 'PX', 1000)
    redis.call('DEL', key)
    return reply
  end
elseif complete then
  redis.call('DEL', key)
  return reply
else
  -- The row stays, with its attempts.
  token, ends_at = nil, 0
end
