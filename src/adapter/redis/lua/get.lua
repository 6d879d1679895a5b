-- Reads a key, and writes nothing.
--
-- ARGV: 1 '1' for the stored data too, '0' without.
-- Replies: {0} missing; {1, state, now, first_seen_at, expires_at, ends_at, attempts, takeover,
-- {token, event type, flags and sections of the stored data}}.
if state == 'unreadable' then return {-1} end
if state == 'missing' then return {0} end
if ARGV[1] == '0' then data_flags, data = 0, '' end
return {1, state, now, first_seen_at, expires_at, ends_at, attempts, takeover and 1 or 0,
  {token or '', string.sub(event_type, 2), data_flags, data}}
