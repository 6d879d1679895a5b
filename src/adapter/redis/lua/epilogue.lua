-- Stands after every script that writes: writes the row, and returns `reply`.
--
-- An event type, and flags of the stored data, that are nil stand for those of the call: ARGV[3] is the event type,
-- ARGV[4] the digest, ARGV[5] to ARGV[7] the status, the headers and the body of a response. A missing one is ''.
event_type = event_type or ARGV[3] ~= '' and string.char(#ARGV[3]) .. ARGV[3] or ''
if not data_flags then
  data_flags, data = ARGV[4] ~= '' and 0x20 or 0, ARGV[4]
  if ARGV[5] ~= '' then
    data_flags = data_flags + 0x40
    data = data .. struct.pack('>I2I4', ARGV[5], #ARGV[6]) .. ARGV[6] .. struct.pack('>I4', #ARGV[7]) .. ARGV[7]
  end
end
if stored then version = (version + 1) % VERSIONS end
local flags = data_flags
if complete then flags = flags + 0x01 end
if token then flags = flags + 0x02 end
if takeover then flags = flags + 0x04 end
if event_type ~= '' then flags = flags + 0x10 end
local value = struct.pack(HEADER, 2, flags, attempts, first_seen_at, expires_at, ends_at, version,
  token or string.rep('\0', 16)) .. event_type .. data
-- At `maxmemory`, a server refuses a script's `SET` unless the script has written before. This changes nothing: a
-- renewal or a completion that was refused would lead to a second run.
if not needs_room then redis.pcall('RENAMENX', key, key) end
-- A live lease is not purged, whatever its retention. 3600000 is `PURGE_GRACE`. Before 6.2 there is no `PXAT`.
local purge_in = math.max(expires_at, complete and 0 or ends_at) - now + 3600000
redis.call('SET', key, value, 'PX', string.format('%.0f', purge_in))
return reply
