-- Inserts complete rows with their stored data, in the order of the arrays.
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type,
  payload_sha256, response_status, response_headers, response_body
)
SELECT a.key, a.namespace, a.id, a.token, NULL, {attempts}, false,
  a.now, a.now, a.now + a.retention, a.event_type,
  a.payload_sha256, a.response_status, a.response_headers, a.response_body
FROM (
  SELECT a.key, a.namespace, a.id, a.token, s.retention, a.event_type,
    a.payload_sha256, a.response_status, a.response_headers, a.response_body,
    clock_timestamp() AS now
  FROM settings AS s, unnest(
    $1::uuid[], $2::text[], $3::text[], $4::uuid[],
    $6::bytea[], $7::int2[], $8::text[], $9::bytea[], $10::text[]
  ) AS a (
    key, namespace, id, token,
    payload_sha256, response_status, response_headers, response_body, event_type
  ){unless}
) AS a
