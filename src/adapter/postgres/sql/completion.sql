-- Completes events in the transaction of a handler, for any driver: `$1` is the text of `OwnCompletion::json`.
--
-- It completes all events, or it is an error that aborts the transaction. The first COMMIT wins, whoever holds the
-- lease. The text of an error has a value of the run, because the planner evaluates a constant one, and the statement
-- would always fail.
WITH asked AS MATERIALIZED (
  SELECT d.token, d.mark, d.first, d.lease_ms * interval '1 millisecond' AS lease,
    d.retention_ms * interval '1 millisecond' AS retention, d.idle_ms,
    pg_catalog.jsonb_array_length(d.events) AS n, d.status, d.headers, pg_catalog.decode(d.body, 'hex') AS body
  FROM pg_catalog.jsonb_to_record($1::text::jsonb) AS d (
    token uuid, mark text, first boolean, lease_ms bigint, retention_ms bigint, idle_ms bigint, events jsonb,
    status smallint, headers text, body text
  )
), bounds AS MATERIALIZED (
  -- For this transaction, and only where its user has set none. `remote_apply` is stronger than `on`. `lock_timeout` is
  -- for this statement, and the last SELECT sets it back: a second transaction of the same handler may hold the row. Not
  -- 2 s, which a handler may have chosen. A transaction that this crate began has its bound on being idle.
  SELECT CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
      THEN pg_catalog.set_config('synchronous_commit', 'on', true) END AS durability,
    CASE WHEN pg_catalog.current_setting('lock_timeout') = '0'
      THEN pg_catalog.set_config('lock_timeout', '1999ms', true) END AS lock_timeout,
    CASE WHEN a.idle_ms IS NOT NULL AND pg_catalog.current_setting('idle_in_transaction_session_timeout') = '0'
      THEN pg_catalog.set_config('idle_in_transaction_session_timeout', a.idle_ms::text, true) END AS idle_timeout,
    -- A completion alone, outside of the transaction with the effect, has written nothing before.
    a.first OR pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL AS is_within,
    -- The mark of a transaction that this crate began is gone after a ROLLBACK or COMMIT of the handler's.
    a.mark IS NULL OR a.mark = pg_catalog.current_setting('tower_dedup.tx', true) AS is_marked
  FROM asked AS a
), held AS MATERIALIZED (
  -- FOR UPDATE carries the whole rows of the other tables beside each row. So `asked` has no list of events. The LIMIT has
  -- the planner expect 10 events. It expects 100 otherwise, and reads a table of up to 30,000 rows as a whole.
  SELECT t.key, a.token, a.lease, a.retention, a.status, a.headers, a.body,
    pg_catalog.decode(e.sha256, 'hex') AS sha256
  FROM asked AS a
  CROSS JOIN bounds AS b
  CROSS JOIN (
    SELECT r.key, r.sha256
    FROM pg_catalog.jsonb_to_recordset(pg_catalog.jsonb_extract_path($1::text::jsonb, 'events'))
      AS r (key uuid, sha256 text)
    LIMIT (SELECT n FROM asked)
  ) AS e
  JOIN {table} AS t ON t.key = e.key
  WHERE b.is_within AND b.is_marked AND t.completed_at IS NULL
  ORDER BY t.key
  FOR UPDATE OF t
), completed AS (
  UPDATE {table} AS t SET
    version = t.version + 1,
    token = h.token,
    completed_at = pg_catalog.clock_timestamp(),
    -- A complete row with a live lease waits for its response.
    lease_until = pg_catalog.clock_timestamp() + h.lease,
    -- A row that only a release has made has expired.
    expires_at = GREATEST(pg_catalog.clock_timestamp() + h.lease, CASE
      WHEN t.expires_at <= pg_catalog.clock_timestamp() THEN pg_catalog.clock_timestamp() + h.retention
      ELSE t.expires_at END),
    payload_sha256 = h.sha256,
    response_status = h.status, response_headers = h.headers, response_body = h.body
  FROM held AS h
  WHERE t.key = h.key
  RETURNING 1
)
SELECT CASE
    WHEN c.n = a.n
      AND (b.lock_timeout IS NULL OR pg_catalog.set_config('lock_timeout', '0', true) IS NOT NULL) THEN 'completed'
    WHEN b.is_within IS NOT TRUE THEN
      ('tower_dedup: nothing was written in this transaction before the completion of ' || a.n
        || ' events: complete after the writes, or call Completion::as_first_statement')::bigint::text
    WHEN b.is_marked IS NOT TRUE THEN
      ('tower_dedup: the transaction has ended before the completion of ' || a.n
        || ' events, by a COMMIT, a ROLLBACK or RESET ALL of the handler')::bigint::text
    WHEN EXISTS (
      SELECT FROM pg_catalog.jsonb_to_recordset(pg_catalog.jsonb_extract_path($1::text::jsonb, 'events')) AS e (key uuid)
      WHERE NOT EXISTS (SELECT FROM {table} AS t WHERE t.key = e.key)
    ) THEN
      ('tower_dedup: an event has no row, of ' || a.n
        || ' events: the connection leads to another database, or a crash has lost the claim')::bigint::text
    ELSE ('tower_dedup: an event is complete already, of ' || a.n || ' events: roll back')::bigint::text
  END AS completion
FROM asked AS a, bounds AS b, (SELECT pg_catalog.count(*) AS n FROM completed) AS c
