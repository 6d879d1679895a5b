-- Deletes a key, unless a live lease holds it.
--
-- Replies: {0} removed; {1} missing; {2} in flight.
if state == 'leased' then return {2} end
return {1 - redis.call('DEL', key)}
