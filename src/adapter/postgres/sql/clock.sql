-- The server's clock, in milliseconds since the Unix epoch, rounded down.
SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8
