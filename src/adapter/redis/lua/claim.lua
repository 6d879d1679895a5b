-- Claims a key that is neither complete nor under a live lease of another token.
--
-- ARGV: 2 token, 3 retention, 4 lease ('' for a claim that is complete at once), 5 the data that a
-- duplicate carries (0 nothing, 1 digest, 2 all), 6 section of the event type, 7 flags and 8 sections of
-- the data to store, 9 '1' to claim nothing: a free key is in flight then.
-- Replies: {0, attempts, takeover, rerun} first; {1, age, flags, sections} duplicate; {2} in flight.
local token = ARGV[2]
local at_once = ARGV[4] == ''
local is_mine = row ~= nil and row.token == token

local function first()
  return {0, math.max(row.attempts, 1), row.takeover and 1 or 0, row.rerun ~= '' and 1 or 0}
end

if state == 'complete' then
  if at_once and is_mine then
    -- Repeated with its token: the first reply may be lost.
    if force then write(row) end
    return first()
  end
  local flags, data = 0, ''
  if ARGV[5] == '1' and bit.band(row.data_flags, 0x20) ~= 0 then
    flags, data = 0x20, string.sub(row.data, 1, 32)
  elseif ARGV[5] == '2' then
    flags, data = row.data_flags, row.data
  end
  return {1, math.max(now - row.first_seen_at, 0), flags, data}
end
if state == 'leased' and (at_once or not is_mine) then return {2} end

local is_repeated = is_mine and not row.complete and not at_once
if not is_repeated then
  if ARGV[9] == '1' then return {2} end
  if state == 'missing' or state == 'expired' then
    row = new_row(ARGV[3], ARGV[6])
  else
    row.attempts = row.attempts + 1
    -- A released row is not taken over.
    row.takeover = row.token ~= nil
  end
end
row.token = token
row.complete = at_once
row.expires_at = after(ARGV[3])
row.ends_at = at_once and now or after(ARGV[4])
row.data_flags, row.data = tonumber(ARGV[7]), ARGV[8]
write(row)
return first()
