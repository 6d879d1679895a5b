-- Parks what is too old to run, and deletes what is parked for long, of every service. A row that runs is left alone.
WITH expired AS (
  UPDATE {table} SET due = NULL, turn = NULL, parked = 'expired' WHERE seq = ANY (ARRAY(
    SELECT seq FROM {table}
    WHERE due IS NOT NULL AND received <= clock_timestamp() - interval '14 days' AND format <= {format}
      AND (turn IS NULL OR due <= clock_timestamp())
    LIMIT 1000 FOR UPDATE SKIP LOCKED))
  RETURNING service, namespace, 'expired' AS parked),
deleted AS (
  DELETE FROM {table} WHERE seq = ANY (ARRAY(
    SELECT seq FROM {table}
    WHERE parked IS NOT NULL AND format <= {format}
      AND (received <= clock_timestamp() - interval '21 days'
        OR parked = 'refused' AND (received <= clock_timestamp() - interval '7 days' OR seq <= (
          SELECT seq FROM {table} WHERE parked = 'refused' ORDER BY seq DESC OFFSET 10000 LIMIT 1)))
    LIMIT 1000 FOR UPDATE SKIP LOCKED))
  RETURNING service, namespace, NULL::text AS parked)
TABLE expired UNION ALL TABLE deleted
