-- Releases the leases of these tokens. The row stays, with its attempts. Returns the rows that it wrote.
--
-- A release is a fence: it raises the version of each row, and inserts an expired row where there is none. So no
-- claim of the token takes effect any more that was made before it. The inserted row has the token, because
-- `excluded` must name it, and no lease, because a row without a lease is nobody's.
{release_rows}
  token = CASE WHEN t.completed_at IS NULL THEN nullif(t.token, excluded.token) ELSE t.token END,
  lease_until = CASE WHEN t.completed_at IS NULL AND t.token = excluded.token THEN NULL ELSE t.lease_until END,
  expires_at = greatest(t.expires_at, clock_timestamp())
RETURNING t.key
