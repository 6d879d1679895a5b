-- Within a transaction: deletes rows that this claim inserted, as a rollback would. It comes before
-- `tx_release_existing`, which lowers the attempts of the other rows.
DELETE FROM {table}
WHERE key = ANY ({keys}) AND token = '{token}' AND completed_at IS NULL AND attempts = 1
