-- Deletes a key, unless a live lease holds it. Without the prelude, because an unreadable value is deleted too:
-- it blocks its event.
--
-- A repetition could delete the row of a later delivery, so the call is sent once.
--
-- Replies: {0} removed; {1} missing; {2} in flight.
local stored = redis.call('GET', KEYS[1])
if not stored then return {1} end
if #stored >= 39 and string.byte(stored, 1) == 1 then
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  -- Incomplete, with a token, until `ends_at`.
  local flags, ends_at = string.byte(stored, 2), struct.unpack('>I6', stored, 18)
  if bit.band(flags, 0x03) == 0x02 and ends_at > now then return {2} end
end
redis.call('DEL', KEYS[1])
return {0}
