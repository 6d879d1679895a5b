-- Stands before every script. Reads the row of `KEYS[1]` into local variables, because a table
-- of each row and functions cost a fifth of the server's time for a claim.
--
-- A script returns at once if it writes nothing. Otherwise it changes the variables of the row, and
-- `epilogue.lua` writes them, at the next version.
--
-- Every script takes the time once, so that all its decisions have one `now`. Times are milliseconds
-- since the Unix epoch. They are exact, because a Lua number is exact up to 2^53.
--
-- The value, big endian, with times of at most 2^48 - 1:
--
--   offset  bytes
--        0      1  the format: 2
--        1      1  flags: 0x01 complete, 0x02 has a token, 0x04 takeover, and one for each section
--        2      3  attempts, saturating
--        5      6  first_seen_at
--       11      6  expires_at
--       17      6  ends_at: of the lease; completed at; 0 of a released row
--       23      5  version: starts at the microseconds of the clock, plus 1 with each write, modulo 2^40
--       28     16  token, zeros without
--       44         sections: 0x10 event type (u8 length), 0x20 payload digest (32 bytes), 0x40 response
--                  (u16 status, u32 length and headers, u32 length and body)
--
-- Redis stores a value of up to 44 bytes in one allocation. So a version has the five bytes that are left: they
-- repeat after 12 days, and must not repeat within an hour.
--
-- A fence row is left where a key was released or forgotten and no other row is: incomplete, without a token,
-- without attempts, and expired since it was written.
local HEADER = '>BBI3I6I6I6I5c16'
-- The microseconds of 12 days. Versions are only compared for equality, and no message is under way for
-- longer than an hour.
local VERSIONS = 1099511627776

local key = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- The row. These are the values of a key that is new from now on. They are those of a fence row too: no
-- token, incomplete, no attempts, expired.
local state = 'missing'
local complete, token, takeover, attempts = false, nil, false, 0
local first_seen_at, expires_at, ends_at = now, now, 0
local version = (clock[1] * 1000000 + clock[2]) % VERSIONS
local event_type, data_flags, data = '', 0, ''
local is_leased = false
-- At `maxmemory`, a script that does not need room writes nevertheless: see `epilogue.lua`.
local needs_room = false

local stored = redis.call('GET', key)
if stored then
  local format, flags, at
  if #stored >= 44 then
    format, flags, attempts, first_seen_at, expires_at, ends_at, version, token =
      struct.unpack(HEADER, stored)
  end
  if format == 2 then
    complete = bit.band(flags, 0x01) ~= 0
    if bit.band(flags, 0x02) == 0 then token = nil end
    takeover = bit.band(flags, 0x04) ~= 0
    is_leased = not complete and token and ends_at > now
    at = 45
    if flags >= 0x10 then
      -- Returns the position after a text whose length, of `size` bytes, stands at `at`.
      local function skip_text(at, size)
        if not at or #stored < at + size - 1 then return nil end
        local length = struct.unpack('>I' .. size, stored, at)
        return at + size + length
      end
      if bit.band(flags, 0x10) ~= 0 then at = skip_text(at, 1) end
      local data_at = at
      if at and bit.band(flags, 0x20) ~= 0 then at = at + 32 end
      if at and bit.band(flags, 0x40) ~= 0 then at = skip_text(skip_text(at + 2, 4), 4) end
      if at then
        event_type = string.sub(stored, 45, data_at - 1)
        data_flags, data = bit.band(flags, 0x60), string.sub(stored, data_at)
      end
    end
    if flags > 0x7f or bit.band(flags, 0x08) ~= 0 then at = nil end
  end
  -- The first rule that applies decides the state. For an unreadable value, and for one of another format,
  -- nothing is decided and nothing is written.
  if at ~= #stored + 1 then state = 'unreadable'
  elseif is_leased then state = 'leased'
  elseif expires_at <= now then state = 'expired'
  elseif complete then state = 'complete'
  else state = token and 'lapsed' or 'released' end
end
