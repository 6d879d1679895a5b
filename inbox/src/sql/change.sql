-- Changes the rows of runs that still have their turns. Passes over a locked row. A deletion that has not found its version
-- makes the row due: somebody was told *stored* meanwhile.
WITH s AS MATERIALIZED (SELECT {durability}),
a AS MATERIALIZED (SELECT a.* FROM unnest($1::int8[], $2::bytea[], $3::int8[], $4::bool[], $5::bool[], $6::int8[], $7::text[],
  $8::int8[], $9::int8[], $10::bool[], $11::text[])
  AS a(seq, turn, version, deletes, keeps, after, parked, attempt, misrouted, answered, last)),
d AS MATERIALIZED (SELECT r.seq FROM a JOIN {table} AS r ON r.seq = a.seq AND r.turn = a.turn
  AND (NOT a.deletes OR r.version <> a.version) FOR UPDATE OF r SKIP LOCKED)
UPDATE {table} AS r SET
  -- Then a refusal is no end, either.
  due = CASE WHEN a.keeps THEN r.due WHEN a.parked = 'refused' AND r.version <> a.version THEN clock_timestamp()
    WHEN a.after >= 0 THEN clock_timestamp() + a.after * interval '1 millisecond' END,
  turn = CASE WHEN a.keeps THEN r.turn END,
  parked = CASE WHEN a.parked <> 'refused' OR r.version = a.version THEN a.parked END,
  attempts = r.attempts + a.attempt,
  misrouted = r.misrouted + a.misrouted,
  answered = r.answered OR a.answered,
  version = r.version + a.answered::int,
  last = coalesce(a.last, r.last)
FROM s, a, d WHERE r.seq = a.seq AND r.seq = d.seq
RETURNING r.seq
