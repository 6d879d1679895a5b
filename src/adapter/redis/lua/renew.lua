-- Moves the end of a lease that the token holds. A lapsed or missing row is revived. A released row is not, even
-- after it has expired: the release may be that of this token.
--
-- ARGV: 1 token, 2 retention, 3 event type, 4 lease.
-- Replies: {0} held; {1} lost.
if state == 'unreadable' then return {-1} end
if stored and (complete or token ~= ARGV[1]) then return {1} end
if not stored then
  attempts, expires_at, event_type = 1, now + ARGV[2], nil
end
token = ARGV[1]
ends_at = now + ARGV[4]
local reply = {0}
