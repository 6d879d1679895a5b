-- Moves the end of a lease that the token holds. A lapsed or missing row is revived.
--
-- ARGV: 2 token, 3 retention, 4 lease, 5 section of the event type.
-- Replies: {0} held; {1} lost.
if row and (row.complete or row.token ~= ARGV[2]) then return {1} end
row = row or new_row(ARGV[3], ARGV[5])
row.token = ARGV[2]
row.ends_at = after(ARGV[4])
write(row)
return {0}
