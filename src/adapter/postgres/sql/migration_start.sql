-- Two processes that both find no table take turns. Any number will do, if it never changes.
SELECT pg_advisory_xact_lock(8389209352947822448)
