-- Completes a key, whoever holds it. A missing row is inserted, also in place of a fence row.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no attempts: so a completion
-- that is repeated has the same reply.
--
-- ARGV: 1 token, 2 retention, 3 event type, 4 to 7 the data to store.
-- Replies: {0} held; {1} lease lost; {2} inserted.
if state == 'unreadable' then return {-1} end
local is_mine = token == ARGV[1]
local is_over = expires_at <= now
local reply = {is_mine and (attempts == 0 and 2 or 0) or 1}

-- A complete row is written again as it is: see `claim.lua`.
if not complete or is_over then
  if complete or attempts == 0 then
    is_over = true
    attempts, takeover, first_seen_at, event_type = 0, false, now, nil
    token, reply = ARGV[1], {2}
  end
  if is_over then
    -- A completion must not be expired when it is written. Otherwise the retention counts from the claim.
    expires_at = now + ARGV[2]
  end
  complete, ends_at = true, now
  data_flags = nil
end
