-- Claims keys that have no row, complete at once, with their stored data.
-- Returns no rows: their number is all that the common case needs, and to hand rows from SQLite's
-- thread to the caller's costs as much as to write them.
{claimed_rows}
ON CONFLICT (namespace, id) DO NOTHING
