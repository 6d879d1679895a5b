WITH settings AS MATERIALIZED (
  SELECT set_config('lock_timeout', '{wait}', true) AS lock_timeout, {durability} AS durability,
    $5::int8 * interval '1 millisecond' AS retention, $7::int8 * interval '1 millisecond' AS lease
)
