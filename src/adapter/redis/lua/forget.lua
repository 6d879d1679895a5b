-- Deletes a value that is still as the caller has read it. Without the prelude: the caller has decided that no
-- live lease holds the row, and each change of a row changes its header. So a repetition deletes no later row.
--
-- ARGV: 2 the first bytes of the value.
-- Replies: {0} deleted; {1} missing; {2} changed.
local stored = redis.call('GET', KEYS[1])
if not stored then
  -- As in the release: an earlier attempt may have deleted the value.
  if ARGV[1] == '1' then
    redis.call('SET', KEYS[1], '', 'PX', 1000)
    redis.call('DEL', KEYS[1])
  end
  return {1}
end
if string.sub(stored, 1, #ARGV[2]) ~= ARGV[2] then return {2} end
redis.call('DEL', KEYS[1])
return {0}
