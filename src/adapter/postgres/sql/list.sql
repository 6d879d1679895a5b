-- Reads at most `$9` rows after the place `$3` in the partition `$4`, in the blocks from `$1` to before
-- `$2`: in the state `$5`, of the namespace `$6`, first seen in the last `$7` milliseconds, with more
-- attempts than `$8`. Null selects all.
SELECT t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at,
  t.expires_at, t.lease_until, t.now, t.version,
  t.event_type,
  t.namespace, t.id, t.place::text AS place, t.partition
FROM (
  SELECT t.*, c.now, {state} AS state, t.ctid AS place, t.tableoid::int8 AS partition
  FROM (SELECT clock_timestamp() AS now) AS c, {table} AS t
  WHERE t.ctid >= $1::text::tid AND t.ctid < $2::text::tid
    AND (t.ctid > $3::text::tid OR t.ctid = $3::text::tid AND t.tableoid::int8 > $4)
) AS t
WHERE t.state <> 5 AND ($5::int4 IS NULL OR t.state = $5)
  AND ($6::text IS NULL OR t.namespace = $6)
  AND ($7::int8 IS NULL OR t.first_seen_at >= t.now - $7 * interval '1 millisecond')
  AND ($8::int8 IS NULL OR t.attempts > $8)
ORDER BY t.place, t.partition
LIMIT $9
