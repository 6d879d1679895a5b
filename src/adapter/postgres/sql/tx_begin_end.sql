-- Within a transaction, before anything that completes keys. Returns no row.
--
-- The COMMIT is durable, and the role is the claim's: the handler may have set one that may not
-- write the table. The handler's role is noted in a setting of the transaction, because one message
-- cannot read it and then use it. `CASE` gives the order.
SELECT WHERE ({durable}) = '' OR {set_role} = ''
