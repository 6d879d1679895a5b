-- Returns the digest, the status, the headers and the body of the stored data; empty texts and 0 for missing ones.
-- `fetch` is '0' for nothing, '1' for the digest, '2' for all.
local function stored_data(fetch)
  local digest, status, headers, body = '', 0, '', ''
  if fetch ~= '0' and bit.band(data_flags, 0x20) ~= 0 then digest = string.sub(data, 1, 32) end
  if fetch == '2' and bit.band(data_flags, 0x40) ~= 0 then
    local at = bit.band(data_flags, 0x20) ~= 0 and 33 or 1
    local length
    status, length = struct.unpack('>I2I4', data, at)
    headers, body = string.sub(data, at + 6, at + 5 + length), string.sub(data, at + 10 + length)
  end
  return digest, status, headers, body
end
