SELECT service, namespace, NULL::text, count(*), extract(epoch FROM clock_timestamp() - min(received))::float8
FROM {table} WHERE due IS NOT NULL GROUP BY 1, 2
