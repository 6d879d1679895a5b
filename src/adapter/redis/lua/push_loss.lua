-- ARGV[2]: the record; ARGV[3]: how many records stay; ARGV[4]: the time to live in ms.
-- A repetition adds nothing.
if not redis.call('LPOS', KEYS[1], ARGV[2]) then
  redis.call('LPUSH', KEYS[1], ARGV[2])
  redis.call('LTRIM', KEYS[1], 0, ARGV[3] - 1)
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 0
