-- The rows that were inserted, updated and deleted since the statistics began.
WITH RECURSIVE part(oid) AS (
  SELECT $1::bigint::oid
  UNION ALL SELECT i.inhrelid FROM pg_inherits AS i JOIN part AS p ON i.inhparent = p.oid
)
SELECT coalesce(sum(t.n_tup_ins), 0)::bigint, coalesce(sum(t.n_tup_upd), 0)::bigint,
  coalesce(sum(t.n_tup_del), 0)::bigint
FROM part AS p JOIN pg_stat_all_tables AS t ON t.relid = p.oid
