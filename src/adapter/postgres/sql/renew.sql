-- Moves the lease of rows that their token holds, and inserts missing rows. Returns those, and the rows that open
-- transactions hold: they are passed over.
-- Rows are locked and inserted in the order of `key`, so that two batches never deadlock.
{renew_settings}{locked_by_others}, renewed AS (
  {renewed_rows}
  ORDER BY a.key
  ON CONFLICT (key) DO UPDATE SET version = t.version + 1, lease_until = excluded.lease_until
  -- A release leaves a row without a lease, which no renewal revives. A complete row with one waits for its response.
  WHERE t.token = excluded.token AND t.lease_until IS NOT NULL
    AND (t.completed_at IS NULL OR t.response_status IS NULL)
  RETURNING t.key
)
SELECT key, false AS is_locked FROM renewed
UNION ALL
SELECT key, true FROM locked_by_others
