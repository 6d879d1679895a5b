-- Inserts rows in the order of the arrays: under a lease, or complete with their stored data.
INSERT INTO {table} AS t (
  key, namespace, id, token, lease_until, attempts, takeover,
  first_seen_at, completed_at, expires_at, event_type{data}
)
SELECT a.key, a.namespace, a.id, a.token, a.now + a.lease, {attempts}, false,
  a.now, {completed_at}, a.now + a.retention, a.event_type{data}
FROM (
  SELECT a.*, s.retention, s.lease, {now} AS now
  FROM settings AS s, unnest(
    $1::uuid[], $2::text[], $3::text[], $4::uuid[], $6::text[]{arrays}{times}
  ) AS a (key, namespace, id, token, event_type{data}{handled_at}){unless}
) AS a
