-- Counts the rows that wait or run, and the parked ones by reason, by the indexes alone.
SELECT service, namespace, NULL::text AS parked, count(*) AS rows,
  (extract(epoch FROM clock_timestamp() - min(received)) * 1000)::int8 AS oldest, sum(bytes)::int8 AS bytes
FROM {table} WHERE due IS NOT NULL GROUP BY 1, 2
UNION ALL
SELECT service, namespace, parked, count(*),
  (extract(epoch FROM clock_timestamp() - min(received)) * 1000)::int8, sum(bytes)::int8
FROM {table} WHERE parked IS NOT NULL GROUP BY 1, 2, 3
