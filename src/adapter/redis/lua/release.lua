-- Releases a key that the token has claimed. Writes in any case: a claim of this token that arrives later
-- finds a row, and not of the version that it names. A missing row becomes a fence row, and a row of
-- another token only gets the next version.
--
-- ARGV: 1 token, 2 '1' to release a row that is complete at once, '0' to release an incomplete row.
-- Replies: {0} released; {1} not held.
if state == 'unreadable' then return {-1} end
local reply = {1}
if token == ARGV[1] and complete == (ARGV[2] == '1') then
  reply = {0}
  token, ends_at = nil, 0
  if complete then
    complete, takeover, attempts, first_seen_at, expires_at = false, false, 0, now, now
    event_type, data_flags, data = '', 0, ''
  end
end
-- Redis deletes the row an hour after it has expired. No message is under way for longer.
expires_at = math.max(expires_at, now)
