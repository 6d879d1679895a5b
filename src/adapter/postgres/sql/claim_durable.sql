-- A claim that is complete at once has no lease. With a synchronous standby, only a durable claim keeps a primary that
-- was cut off from granting keys beside its successor.
CASE WHEN $7::int8 IS NOT NULL AND current_setting('synchronous_standby_names') = ''
  THEN set_config('synchronous_commit', 'off', true) ELSE {durable} END
