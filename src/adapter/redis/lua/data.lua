-- Stands before a script that returns stored data, and has put into `fetch`: '0' for nothing, '1' for the digest,
-- '2' for all. A function would cost each claim its creation.
local digest, status, headers, body = '', 0, '', ''
if data ~= '' and fetch ~= '0' then
  local at = 1
  if bit.band(data_flags, 0x20) ~= 0 then
    digest = string.sub(data, 1, 32)
    at = 33
  end
  if bit.band(data_flags, 0x40) ~= 0 and fetch == '2' then
    local length
    status, length = struct.unpack('>I2I4', data, at)
    headers, body = string.sub(data, at + 6, at + 5 + length), string.sub(data, at + 10 + length)
  end
end
