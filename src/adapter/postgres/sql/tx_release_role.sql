-- Within a transaction, before keys are released: sets the role of the claim.
SELECT WHERE {set_role} = ''
