-- Stands before every script that writes. Reads the row of `KEYS[1]`, and defines how a row is written.
-- `ARGV[1]` is '1' if a positive reply must write the row again: the caller waits for replicas.
--
-- Every script takes the time once, so that all its decisions have one `now`. Times are milliseconds
-- since the Unix epoch. They are exact, because a Lua number is exact up to 2^53.
--
-- The value, big endian: u8 version, u8 flags, u24 attempts, u48 first_seen_at, u48 expires_at,
-- u48 ends_at, 16 bytes token, then the sections that the flags name: 0x08 rerun, 0x10 event type,
-- 0x20 payload digest, 0x40 response. `src/adapter/redis/value.rs` reads and writes the same.
local HEADER = '>BBI3I6I6I6c16'
local MAX_TIME = 281474976710655
local MAX_ATTEMPTS = 16777215
local PURGE_GRACE = 3600000
local NO_TOKEN = string.rep('\0', 16)

local key = KEYS[1]
local force = ARGV[1] == '1'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Returns the time after this many milliseconds, at most the latest time of a row.
local function after(ms)
  return math.min(now + tonumber(ms), MAX_TIME)
end

-- Returns the position after a text whose length, of `size` bytes, stands at `at`.
local function skip_text(value, at, size)
  if not at or #value < at + size - 1 then return nil end
  local length = struct.unpack('>I' .. size, value, at)
  return at + size + length
end

-- Returns the row of a value; nil for a value that is unreadable, or of another version.
local function read(value)
  if #value < 39 or string.byte(value, 1) ~= 1 then return nil end
  local _, flags, attempts, first_seen_at, expires_at, ends_at, token = struct.unpack(HEADER, value)
  local rerun_at, at = 40, 40
  if bit.band(flags, 0x08) ~= 0 then
    at = skip_text(value, skip_text(value, at + 22, 2), 2)
  end
  local type_at = at
  if bit.band(flags, 0x10) ~= 0 then at = skip_text(value, at, 1) end
  local data_at = at
  if at and bit.band(flags, 0x20) ~= 0 then at = at + 32 end
  if at and bit.band(flags, 0x40) ~= 0 then
    at = skip_text(value, skip_text(value, at + 2, 4), 4)
  end
  if flags > 0x7f or at ~= #value + 1 then return nil end
  return {
    complete = bit.band(flags, 0x01) ~= 0,
    token = bit.band(flags, 0x02) ~= 0 and token or nil,
    takeover = bit.band(flags, 0x04) ~= 0,
    attempts = attempts,
    first_seen_at = first_seen_at,
    expires_at = expires_at,
    ends_at = ends_at,
    rerun = string.sub(value, rerun_at, type_at - 1),
    event_type = string.sub(value, type_at, data_at - 1),
    data_flags = bit.band(flags, 0x60),
    data = string.sub(value, data_at),
  }
end

local function write(row)
  local flags = row.data_flags
  if row.complete then flags = flags + 0x01 end
  if row.token then flags = flags + 0x02 end
  if row.takeover then flags = flags + 0x04 end
  if row.rerun ~= '' then flags = flags + 0x08 end
  if row.event_type ~= '' then flags = flags + 0x10 end
  local value = struct.pack(HEADER, 1, flags, math.min(row.attempts, MAX_ATTEMPTS),
    row.first_seen_at, row.expires_at, row.ends_at, row.token or NO_TOKEN)
  value = value .. row.rerun .. row.event_type .. row.data
  -- A live lease is not purged, whatever its retention.
  local ends_at = row.complete and 0 or row.ends_at
  local purge_at = math.max(row.expires_at, ends_at) + PURGE_GRACE
  redis.call('SET', key, value, 'PXAT', string.format('%.0f', purge_at))
end

-- Returns the row of a key that is new from now on.
local function new_row(retention, event_type)
  return {
    complete = false, token = nil, takeover = false, attempts = 1,
    first_seen_at = now, expires_at = after(retention), ends_at = 0,
    rerun = '', event_type = event_type, data_flags = 0, data = '',
  }
end

-- The first rule that applies decides the state, as in `src/adapter/redis/value.rs`.
local function state_of(row)
  if not row then return 'missing' end
  if not row.complete and row.token and row.ends_at > now then return 'leased' end
  if row.expires_at <= now then return 'expired' end
  if row.complete then return 'complete' end
  return row.token and 'lapsed' or 'released'
end

local row
local stored = redis.call('GET', key)
if stored then
  row = read(stored)
  -- Unreadable: nothing is decided and nothing is written.
  if not row then return {-1} end
end
local state = state_of(row)
