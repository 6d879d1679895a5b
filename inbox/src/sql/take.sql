-- Takes due rows, of each namespace the longest due ones. A row whose turn has lapsed waits for its next delay, so that the
-- neighbours of a deadly event part from it. Each namespace has a LIMIT of its own: a backlog in another one costs nothing.
-- One reply has a few bytes of bodies, or one row: more would outlast the bound of the call, each time again.
WITH s AS MATERIALIZED (SELECT {durability}),
d AS MATERIALIZED (
  SELECT i.seq, i.due, i.turn IS NOT NULL AS has_lapsed, CASE WHEN i.turn IS NULL THEN octet_length(i.body) ELSE 0 END AS size
  FROM unnest($2::text[]) AS n(namespace) CROSS JOIN LATERAL (
    SELECT i.seq, i.due, i.turn, i.body FROM {table} AS i
    WHERE i.service = $1 AND i.namespace = n.namespace AND i.due <= clock_timestamp() AND i.format <= {format}
      AND i.received > clock_timestamp() - interval '14 days'
    ORDER BY i.due LIMIT $3 FOR UPDATE SKIP LOCKED) AS i
  LIMIT $4),
b AS (SELECT d.*, sum(d.size) OVER (ORDER BY d.due, d.seq) - d.size AS before FROM d)
UPDATE {table} AS r SET
  turn = CASE WHEN NOT b.has_lapsed THEN $5::bytea END,
  due = CASE WHEN NOT b.has_lapsed THEN clock_timestamp() + $6::int8 * interval '1 millisecond'
    WHEN r.attempts < cardinality($7::int8[])
      THEN clock_timestamp() + ($7::int8[])[r.attempts + 1] * (0.8 + 0.4 * random()) * interval '1 millisecond' END,
  parked = CASE WHEN b.has_lapsed AND r.attempts >= cardinality($7::int8[]) THEN 'died' END,
  attempts = r.attempts + b.has_lapsed::int,
  deaths = r.deaths + b.has_lapsed::int,
  last = CASE WHEN b.has_lapsed THEN 'its process died, or lost its turn' ELSE r.last END
FROM s, b WHERE r.seq = b.seq AND b.before < {bytes}
RETURNING NOT b.has_lapsed AS is_ours, r.seq, r.version, r.namespace, r.keys, r.attempts, r.misrouted, r.answered, r.parked,
  r.method, r.target, r.headers,
  CASE WHEN NOT b.has_lapsed THEN r.body END AS body, r.verified
