-- As `claim_insert.sql`. The rows are complete at once, with their stored data.
{settings}
{claimed_rows}
ON CONFLICT (key) DO NOTHING
RETURNING t.key
