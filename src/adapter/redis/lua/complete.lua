-- Completes a key, whoever holds it. A missing row is inserted, also in place of a fence row.
--
-- The holder's token stays: it shows whether the caller held the key. An inserted row has no attempts.
--
-- ARGV: 2 token, 3 retention, 4 section of the event type, 5 flags and 6 sections of the data to store.
-- Replies: {0} held; {1} lease lost; {2} inserted.
if state == 'unreadable' then return {-1} end
local is_mine = token == ARGV[2]
local is_over = expires_at <= now
local reply = {is_mine and 0 or 1}

if complete and not is_over then
  if not force then return reply end
else
  if complete or attempts == 0 then
    is_over = true
    attempts, takeover, first_seen_at, event_type = 0, false, now, ARGV[4]
    token, reply = ARGV[2], {2}
  end
  if is_over then
    -- A completion must not be expired when it is written. Otherwise the retention counts from the claim.
    expires_at = math.min(now + ARGV[3], MAX_TIME)
  end
  complete, ends_at = true, now
  data_flags, data = tonumber(ARGV[5]), ARGV[6]
end
