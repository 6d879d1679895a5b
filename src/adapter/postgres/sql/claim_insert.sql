-- Claims keys that have no row. Returns those. A key that has a row is neither locked nor written.
{claim_settings}
{leased_rows}
ON CONFLICT (key) DO NOTHING
RETURNING t.key
