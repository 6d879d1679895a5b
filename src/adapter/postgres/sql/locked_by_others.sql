, locked AS MATERIALIZED (
  SELECT t.key
  FROM {table} AS t
  WHERE t.key = ANY ($1::uuid[])
  ORDER BY t.key
  FOR UPDATE SKIP LOCKED
), locked_by_others AS MATERIALIZED (
  SELECT t.key
  FROM {table} AS t
  WHERE t.key = ANY ($1::uuid[]) AND NOT EXISTS (SELECT FROM locked AS l WHERE l.key = t.key)
)
