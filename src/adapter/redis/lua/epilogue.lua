-- Stands after every script that begins with the prelude: writes the row, and returns `reply`.
if stored then version = (version + 1) % VERSIONS end
local flags = data_flags
if complete then flags = flags + 0x01 end
if token then flags = flags + 0x02 end
if takeover then flags = flags + 0x04 end
if event_type ~= '' then flags = flags + 0x10 end
local value = struct.pack(HEADER, 2, flags, attempts, first_seen_at, expires_at, ends_at, version,
  token or string.rep('\0', 16)) .. event_type .. data
-- A live lease is not purged, whatever its retention. 3600000 is `PURGE_GRACE`. Before 6.2 there is no `PXAT`.
local purge_in = math.max(expires_at, complete and 0 or ends_at) - now + 3600000
redis.call('SET', key, value, 'PX', string.format('%.0f', purge_in))
return reply
