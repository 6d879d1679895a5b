-- As `claim_insert.sql`. The rows are complete at once, with their stored data.
{claimed_rows}
ON CONFLICT (namespace, id) DO NOTHING
