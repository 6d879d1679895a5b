-- Reads a key, and writes nothing.
--
-- ARGV: 1 the stored data to fetch, as in `data.lua`.
-- Replies: {0} missing; {1, state, now, first_seen_at, expires_at, ends_at, attempts, takeover, event type, {digest,
-- status, headers, body}}.
if state == 'unreadable' then return {-1} end
if state == 'missing' then return {0} end
return {1, state, now, first_seen_at, expires_at, ends_at, attempts, takeover and 1 or 0, string.sub(event_type, 2),
  {digest, status, headers, body}}
