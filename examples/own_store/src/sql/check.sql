-- With `--sysdate-is-now`, SYSDATE is the time at which the statement began.
SELECT VERSION() AS version, SLEEP(0.002) = 0 AND SYSDATE(6) > NOW(6) AS has_clock
