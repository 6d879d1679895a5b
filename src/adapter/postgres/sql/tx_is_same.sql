-- Within a transaction without keys: the last statement before COMMIT. Returns a row if the
-- transaction is the one that was opened. `top` is false, because no row shows a leaked savepoint.
SELECT false AS top WHERE pg_current_xact_id_if_assigned()::text = '{xid}'
