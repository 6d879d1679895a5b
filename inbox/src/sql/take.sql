-- Takes due rows, of each namespace the longest due ones. A row whose turn has lapsed waits for its next delay, so that the
-- neighbours of a deadly event part from it. Each namespace has a LIMIT of its own: a backlog in another one costs nothing.
-- Rows that are not due yet cost nothing, because the time of the statement is a bound of the index: that of the clock is not.
WITH s AS MATERIALIZED (SELECT {durability}),
d AS MATERIALIZED (
  SELECT i.seq, i.turn IS NOT NULL AS has_lapsed
  FROM unnest($2::text[]) AS n(namespace) CROSS JOIN LATERAL (
    SELECT i.seq, i.turn FROM {table} AS i
    WHERE i.service = $1 AND i.namespace = n.namespace AND i.due <= statement_timestamp() AND i.format <= {format}
      AND i.received > statement_timestamp() - interval '14 days'
    ORDER BY i.due LIMIT $3 FOR UPDATE SKIP LOCKED) AS i
  LIMIT $4)
UPDATE {table} AS r SET
  turn = CASE WHEN NOT d.has_lapsed THEN $5::bytea END,
  due = CASE WHEN NOT d.has_lapsed THEN clock_timestamp() + $6::int8 * interval '1 millisecond'
    WHEN r.attempts < cardinality($7::int8[])
      THEN clock_timestamp() + ($7::int8[])[r.attempts + 1] * (0.8 + 0.4 * random()) * interval '1 millisecond' END,
  parked = CASE WHEN d.has_lapsed AND r.attempts >= cardinality($7::int8[]) THEN 'died' END,
  attempts = r.attempts + d.has_lapsed::int,
  deaths = r.deaths + d.has_lapsed::int,
  last = CASE WHEN d.has_lapsed THEN 'its process died, or lost its turn' ELSE r.last END
FROM s, d WHERE r.seq = d.seq
RETURNING NOT d.has_lapsed AS is_ours, r.seq, r.version, r.namespace, r.keys, r.attempts::int8, r.misrouted::int8, r.answered,
  r.parked,  r.method, r.target, r.headers, CASE WHEN r.bytes <= 262144 THEN r.body END AS body, r.verified
