-- As `claim_upsert.sql`. The rows are complete, since the event was handled, with their stored data.
{past_rows}
{take}
