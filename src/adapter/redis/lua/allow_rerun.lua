-- Lets a key run again that no live lease holds, and stores who allows it and why.
--
-- The row has no token, so the next claim is no takeover; except after a lease that has lapsed.
-- The key is remembered for at least 7 days, so that the sender can deliver the event again.
-- A client may repeat the command: the nonce of the call shows that the row has it already.
--
-- ARGV: 2 the section of the rerun without its time: 16 bytes nonce, then who and why.
-- Replies: {0} allowed; {1} missing; {2} in flight.
if row and row.rerun ~= '' and string.sub(row.rerun, 7, 22) == string.sub(ARGV[2], 1, 16) then
  if force then write(row) end
  return {0}
end
if state == 'leased' then return {2} end
if state == 'missing' or state == 'expired' then return {1} end
if row.complete then
  row.token = nil
  row.ends_at = 0
end
row.complete = false
-- A completion without a claim has run the event once.
row.attempts = math.max(row.attempts, 1)
row.expires_at = math.max(row.expires_at, after(7 * 86400000))
row.rerun = struct.pack('>I6', now) .. ARGV[2]
row.data_flags, row.data = 0, ''
write(row)
return {0}
