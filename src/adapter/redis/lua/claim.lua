-- Claims a key that is neither complete nor under a live lease of another token: inserts a row, or takes a
-- free one at the version that the caller has read. So a claim that arrives after its release changes
-- nothing: the release has left a row, of another version.
--
-- ARGV: 1 token, 2 retention, 3 event type, 4 to 7 the data to store, 8 lease ('' for a claim that is complete at
-- once), 9 the data that a duplicate carries, as in `data.lua`, 10 when an event of the past was handled, or '', 11 the
-- version of the free row, once it is known.
-- Replies: {0, attempts, takeover} first; {1, age} or {1, age, {digest, status, headers, body}} duplicate; {2} in
-- flight; {3, version} a free row of another version than the call names.
if state == 'unreadable' then return {-1} end
local at_once = ARGV[8] == ''
local handled_at = at_once and ARGV[10] ~= '' and math.min(ARGV[10], now) or now
local is_mine = token == ARGV[1]
local is_repeated = is_mine and complete == at_once

if state == 'complete' then
  if not is_repeated then
    -- A command that writes and changes nothing: a replica, which may be behind, refuses it.
    redis.call('RENAMENX', key, key)
    local age = math.max(now - first_seen_at, 0)
    if fetch == '0' then return {1, age} end
    return {1, age, {digest, status, headers, body}}
  end
elseif state == 'leased' and (at_once or not is_mine) then
  return {2}
else
  if at_once or not is_repeated then
    if stored and tonumber(ARGV[11]) ~= version then return {3, version} end
    if state == 'missing' or state == 'expired' then
      attempts, takeover, first_seen_at, event_type = 1, false, handled_at, nil
    else
      attempts = math.min(attempts + 1, 16777215)
      -- A released row is not taken over.
      takeover = token ~= nil
    end
  end
  token, complete = ARGV[1], at_once
  -- `epilogue.lua` needs one that is not long over.
  expires_at = math.max(handled_at + ARGV[2], now)
  ends_at = at_once and handled_at or now + ARGV[8]
  data_flags = nil
end
-- A claim that is repeated with its token writes again: `WAIT` waits for writes of its own connection only, and
-- the first write may have been on another one.
needs_room = not is_mine
local reply = {0, math.max(attempts, 1), takeover and 1 or 0}
