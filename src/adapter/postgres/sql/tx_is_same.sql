-- Within a transaction without keys: the last statement before COMMIT. Returns a row if the
-- transaction is the one that was opened.
SELECT WHERE pg_current_xact_id_if_assigned()::text = '{xid}'
