-- ARGV[2]: the last acknowledged number, 0 if no number is expected; ARGV[3]: the new number;
-- ARGV[4]: the time to live in ms. Returns the number that was there, or -1.
local found = tonumber(redis.call('GET', KEYS[1]) or -1) or -1
local expected, number = tonumber(ARGV[2]), tonumber(ARGV[3])
-- A number below the expected one stays: it is the evidence of a loss, and this reply may be lost.
-- A larger number stays too: this call may be a late repetition.
if found < number and (expected == 0 or found >= expected) then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
end
return found
