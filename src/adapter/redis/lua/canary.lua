-- ARGV[2]: the last acknowledged number, 0 if no number is expected; ARGV[3]: the new number;
-- ARGV[4]: the time to live in ms; ARGV[5]: the replication id that the server has named, empty if it
-- has not. Returns the number that was there, or -1; -2 if the replication id is another one.
if ARGV[5] ~= '' then
  -- A number that a new primary takes would seem to prove that it has what the old one acknowledged.
  local info = redis.pcall('INFO', 'replication')
  local id = type(info) == 'string' and string.match(info, 'master_replid:(%w+)')
  if id and id ~= ARGV[5] then return -2 end
end
local found = tonumber(redis.call('GET', KEYS[1]) or -1) or -1
local expected, number = tonumber(ARGV[2]), tonumber(ARGV[3])
-- A number below the expected one stays: it is the evidence of a loss, and this reply may be lost.
-- A larger number stays too: this call may be a late repetition.
if found < number and (expected == 0 or found >= expected) then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
end
return found
