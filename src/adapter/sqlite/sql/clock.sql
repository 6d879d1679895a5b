-- The store's clock, in milliseconds since the Unix epoch.
SELECT {now}
