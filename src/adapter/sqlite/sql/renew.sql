-- Moves the lease of rows that their token holds, and inserts missing rows. A complete row with a lease waits for its
-- response.
{leased_rows}
ON CONFLICT (namespace, id) DO UPDATE SET lease_until = excluded.lease_until
WHERE t.token IS excluded.token
  AND (t.completed_at IS NULL OR (t.lease_until IS NOT NULL AND t.response_status IS NULL))
RETURNING namespace, id
