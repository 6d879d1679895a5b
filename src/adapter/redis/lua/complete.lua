-- Completes a key, whoever holds it; a missing row is inserted.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no attempts.
-- After a rerun was allowed, only the key's holder completes it: an earlier handler may still run.
--
-- ARGV: 2 token, 3 retention, 4 section of the event type, 5 flags and 6 sections of the data to store.
-- Replies: {0} held; {1} lease lost; {2} inserted.
local is_mine = row ~= nil and row.token == ARGV[2]
local is_over = row == nil or row.expires_at <= now
if row and not is_over then
  if row.complete then
    if force and is_mine then write(row) end
    return {is_mine and 0 or 1}
  end
  if row.rerun ~= '' and not is_mine then return {1} end
end

local reply = is_mine and 0 or 1
if not row or row.complete then
  row = new_row(ARGV[3], ARGV[4])
  row.token = ARGV[2]
  row.attempts = 0
  reply = 2
elseif is_over then
  -- A completion must not be expired when it is written. Otherwise the retention counts from the claim.
  row.expires_at = after(ARGV[3])
end
row.complete = true
row.ends_at = now
row.data_flags, row.data = tonumber(ARGV[5]), ARGV[6]
write(row)
return {reply}
