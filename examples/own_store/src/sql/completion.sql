-- Completes the events of a delivery in the transaction of a handler, on a connection of its own driver: the parameter is
-- the text of `completion::parameter`, whose bytes are in hex.
--
-- It completes all events, or it is an error. The row decides, whoever holds its lease: the first COMMIT wins. MariaDB has
-- no statement that raises an error here, so the refusal is a sum that is out of range: its message quotes the name of the
-- column, and no SQL mode turns it into a warning. A LEFT JOIN, and not an inner one: a missing row must be an error.
--
-- The session is the handler's, so the statement brings its bound on the wait, and its time zone, by which SYSDATE is read.
-- Outside of a transaction it is refused: it would complete the events without the effect.
SET STATEMENT innodb_lock_wait_timeout = 2, time_zone = '+00:00' FOR
UPDATE JSON_TABLE(?, '$' COLUMNS (
    token VARCHAR(32) PATH '$.token',
    retention_ms BIGINT PATH '$.retention_ms',
    keeps_lease BOOLEAN PATH '$.keeps_lease',
    status BIGINT PATH '$.status',
    headers LONGTEXT PATH '$.headers',
    body LONGTEXT PATH '$.body',
    NESTED PATH '$.events[*]' COLUMNS (
      namespace VARCHAR(128) PATH '$[0]',
      id VARCHAR(510) PATH '$[1]',
      sha256 VARCHAR(64) PATH '$[2]',
      `tower_dedup: an event is complete or has no row: roll back` INT EXISTS PATH '$[0]',
      `tower_dedup: this connection is in no transaction` INT EXISTS PATH '$[0]'
    )
  )) AS e
LEFT JOIN {table} AS t ON t.namespace = UNHEX(e.namespace) AND t.id = UNHEX(e.id)
SET
  t.version = t.version + 1,
  t.token = UNHEX(e.token),
  t.completed_at = {now},
  -- A complete row with a live lease waits for its response.
  t.lease_until = IF(e.keeps_lease, t.lease_until, NULL),
  -- A row that only a release has made has expired: complete and expired, its event would run again.
  t.expires_at = IF(t.expires_at <= {now}, {now} + e.retention_ms, t.expires_at),
  t.payload_sha256 = UNHEX(e.sha256),
  t.response_status = e.status, t.response_headers = UNHEX(e.headers), t.response_body = UNHEX(e.body)
WHERE CASE
    WHEN NOT @@in_transaction THEN 9223372036854775807 + e.`tower_dedup: this connection is in no transaction`
    WHEN t.id IS NULL OR t.completed_at IS NOT NULL
      THEN 9223372036854775807 + e.`tower_dedup: an event is complete or has no row: roll back`
    ELSE TRUE
  END
