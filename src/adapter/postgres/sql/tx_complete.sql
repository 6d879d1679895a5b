-- Within a transaction: completes its keys, as the last statement before COMMIT.
--
-- A completion must not be expired when it is written: the retention counts from the claim, and a
-- handler may run for longer.
UPDATE {table} AS t SET
  version = t.version + 1,
  completed_at = clock_timestamp(),
  lease_until = NULL,
  expires_at = CASE WHEN t.expires_at <= clock_timestamp()
    THEN clock_timestamp() + {retention_ms} * interval '1 millisecond' ELSE t.expires_at END
WHERE t.key = ANY ({keys}) AND t.token = '{token}' AND t.completed_at IS NULL
  -- Null in a transaction that has written nothing: not the one that claimed.
  AND pg_current_xact_id_if_assigned()::text = '{xid}'
RETURNING t.key
