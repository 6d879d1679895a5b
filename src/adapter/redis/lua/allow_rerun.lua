-- Lets a key run again that no live lease holds, and stores who allows it and why.
--
-- The row has no token, so the next claim is no takeover; except after a lease that has lapsed.
-- The key is remembered for at least 7 days, so that the sender can deliver the event again.
-- A client may repeat the command: the nonce of the call shows that the row has it already.
--
-- ARGV: 2 the section of the rerun without its time: 16 bytes nonce, then who and why.
-- Replies: {0} allowed; {1} missing; {2} in flight.
local reply = {0}
if rerun ~= '' and string.sub(rerun, 7, 22) == string.sub(ARGV[2], 1, 16) then
  if not force then return reply end
else
  if state == 'leased' then return {2} end
  if state == 'missing' or state == 'expired' then return {1} end
  if complete then token, ends_at = nil, 0 end
  complete = false
  -- A completion without a claim has run the event once.
  attempts = math.max(attempts, 1)
  expires_at = math.max(expires_at, math.min(now + 7 * 86400000, MAX_TIME))
  rerun = struct.pack('>I6', now) .. ARGV[2]
  data_flags, data = 0, ''
end
