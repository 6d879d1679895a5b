-- Within a transaction, before its keys are completed: stores their data.
UPDATE {table} AS t SET
  payload_sha256 = a.payload_sha256, response_status = a.response_status,
  response_headers = a.response_headers, response_body = a.response_body
FROM unnest($1::uuid[], $3::bytea[], $4::int2[], $5::text[], $6::bytea[])
  AS a (key, payload_sha256, response_status, response_headers, response_body)
WHERE t.key = a.key AND t.token = $2
