-- Whether the transaction has written nothing.
SELECT pg_current_xact_id_if_assigned() IS NULL
