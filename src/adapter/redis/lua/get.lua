-- Reads a key. Without the prelude: it decides nothing.
--
-- Replies: {the time, the value}; {the time, nil} for a missing key.
local clock = redis.call('TIME')
return {clock[1] * 1000 + math.floor(clock[2] / 1000), redis.call('GET', KEYS[1])}
