SELECT service, namespace, parked, count(*), extract(epoch FROM clock_timestamp() - min(received))::float8
FROM {table} WHERE parked IS NOT NULL GROUP BY 1, 2, 3
