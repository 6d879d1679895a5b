-- Renews the turns of the runs of this process.
WITH s AS MATERIALIZED (SELECT {durability}),
d AS MATERIALIZED (SELECT r.seq FROM unnest($1::int8[], $2::bytea[]) AS a(seq, turn)
  JOIN {table} AS r ON r.seq = a.seq AND r.turn = a.turn FOR UPDATE OF r SKIP LOCKED)
UPDATE {table} AS r SET due = clock_timestamp() + $3::int8 * interval '1 millisecond' FROM s, d WHERE r.seq = d.seq
