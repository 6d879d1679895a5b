-- Is a syntax error on MySQL, and before MariaDB 10.6. With `--sysdate-is-now`, SYSDATE is the time at which the statement
-- began.
SET STATEMENT innodb_lock_wait_timeout = 0 FOR
SELECT SLEEP(0.002) = 0 AND SYSDATE(6) > NOW(6) AS has_clock FROM JSON_TABLE('[1]', '$[*]' COLUMNS (n INT PATH '$')) AS t
