-- The state of a row `t` at the time `c.now`: the rules of `sql/row.rs`.
CASE
    WHEN t.completed_at IS NULL AND t.token IS NOT NULL AND t.lease_until > c.now THEN 1
    WHEN t.expires_at <= c.now THEN 5
    WHEN t.completed_at IS NOT NULL THEN 4
    WHEN t.lease_until IS NOT NULL THEN 2
    ELSE 3
  END
