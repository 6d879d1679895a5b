-- Claims keys that have no row, complete at once, with their stored data. Returns those.
-- A key that has a row is neither locked nor written. Rows are inserted in the order of the arrays.
WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout, {durable} AS durability,
    $5::int8 * interval '1 millisecond' AS retention
)
{claimed_rows}
ON CONFLICT (key) DO NOTHING
RETURNING t.key
