-- The rows of the table as the catalogue estimates them, and its bytes with indexes; of a partitioned table, of all
-- partitions. The catalogue has -1 for a table that was never analyzed.
SELECT
  coalesce(sum(greatest(c.reltuples, 0)), 0)::int8 AS rows,
  coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 AS bytes
FROM pg_class AS c
WHERE c.oid IN (
    SELECT p.relid::oid FROM pg_partition_tree({table_number}) AS p
    UNION
    SELECT {table_number}::oid
  )
  AND c.relkind <> 'p'
