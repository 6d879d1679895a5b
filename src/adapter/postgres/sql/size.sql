-- The blocks of the table, and its bytes with indexes; of a partitioned table, one row per partition.
SELECT
  coalesce(pg_relation_size(l.number), 0) / current_setting('block_size')::int8 AS blocks,
  coalesce(pg_total_relation_size(l.number), 0) AS bytes
FROM (
  SELECT p.relid::oid AS number FROM pg_partition_tree({table_number}) AS p WHERE p.isleaf
  UNION
  SELECT c.oid FROM pg_class AS c WHERE c.oid = {table_number} AND c.relkind <> 'p'
) AS l
