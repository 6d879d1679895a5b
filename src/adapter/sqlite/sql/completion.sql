-- Completes events in the transaction of a handler, for any driver: `?1` is the text of `OwnCompletion::json`.
--
-- It completes all events, or it is an error; only the statement is undone then. A LEFT JOIN, and not an inner one: an
-- event without a row must be an error. `json_extract` carries the text of the error, because SQLite raises errors of
-- its own in triggers only.
INSERT INTO {table} AS t (
  namespace, id, attempts, takeover, first_seen_at, expires_at, token, lease_until,
  payload_sha256, response_status, response_headers, response_body
)
SELECT e.value ->> 0, e.value ->> 1,
  CASE WHEN h.id IS NULL
    THEN json_extract('[]', 'tower_dedup: an event has no row, at position ' || e.key
      || ': the connection leads to another database, or a crash has lost the claim')
    WHEN h.completed_at IS NOT NULL
    THEN json_extract('[]', 'tower_dedup: an event is complete already, at position ' || e.key || ': roll back')
    ELSE 0 END,
  0, 0, {now} + (?1 ->> '$.retention_ms'), unhex(?1 ->> '$.token'),
  {now} + (?1 ->> '$.lease_ms'),
  unhex(e.value ->> 2), ?1 ->> '$.status', ?1 ->> '$.headers', unhex(?1 ->> '$.body')
FROM json_each(?1, '$.events') AS e
LEFT JOIN {table} AS h ON h.namespace = e.value ->> 0 AND h.id = e.value ->> 1
WHERE true
ON CONFLICT (namespace, id) DO UPDATE SET
  token = excluded.token,
  completed_at = {now},
  lease_until = excluded.lease_until,
  expires_at = max(
    coalesce(excluded.lease_until, 0), CASE WHEN t.expires_at <= {now} THEN excluded.expires_at ELSE t.expires_at END
  ),
  payload_sha256 = excluded.payload_sha256, response_status = excluded.response_status,
  response_headers = excluded.response_headers, response_body = excluded.response_body
