-- Makes a row a fence row, unless a live lease holds it: a release by a caller without a token. The fence row
-- stays for the claims that are still under way. An unreadable value is replaced too: it blocks its event.
--
-- A call that named no version could undo a later delivery.
--
-- ARGV: 1 the version of the row, once it is known; -1 for an unreadable value.
-- Replies: {0} removed; {1} missing; {2} in flight; {3, version} a row of another version than the call names.
if state == 'missing' or state == 'expired' then return {1} end
if is_leased then return {2} end
local found = state == 'unreadable' and -1 or version
if tonumber(ARGV[1]) ~= found then return {3, found} end
complete, token, takeover, attempts = false, nil, false, 0
first_seen_at, expires_at, ends_at = now, now, 0
event_type, data_flags, data = '', 0, ''
local reply = {0}
