-- Moves the lease of rows that their token holds, and inserts missing rows.
{leased_rows}
ON CONFLICT (namespace, id) DO UPDATE SET lease_until = excluded.lease_until
WHERE (t.completed_at IS NULL AND t.token IS excluded.token)
RETURNING namespace, id
