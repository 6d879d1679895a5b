-- Deletes rows in the versions that their runs know. Passes over a locked row.
WITH s AS MATERIALIZED (SELECT {durability})
DELETE FROM {table} AS t USING s WHERE t.seq = ANY (ARRAY(
  SELECT r.seq FROM unnest($1::int8[], $2::int8[]) AS a(seq, version)
  JOIN {table} AS r ON r.seq = a.seq AND r.version = a.version
  FOR UPDATE OF r SKIP LOCKED))
RETURNING t.seq
