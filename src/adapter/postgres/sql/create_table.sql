-- fillfactor: a completion is a HOT update if its page has room.
-- autovacuum: the table holds one retention of keys. A purge, and each completion, leaves a dead row. By
-- default a fifth of the table may be dead before a vacuum: six days of a retention of 30. Here it is a
-- fiftieth, and 1,000 rows so that a small table is not vacuumed every minute. The first vacuum after
-- inserts freezes rows early, so that no vacuum freezes all of them at once.
-- version: a new row starts at the clock, in microseconds, and every update adds 1. So a row that was purged and made
-- again never has an old version.
CREATE TABLE IF NOT EXISTS {table} (
    key uuid PRIMARY KEY,
    version bigint NOT NULL DEFAULT (date_part('epoch', clock_timestamp()) * 1000000),
    namespace text NOT NULL,
    id text NOT NULL,
    token uuid,
    lease_until timestamptz,
    attempts integer NOT NULL,
    takeover boolean NOT NULL,
    first_seen_at timestamptz NOT NULL,
    completed_at timestamptz,
    expires_at timestamptz NOT NULL,
    event_type text,
    payload_sha256 bytea,
    response_status smallint,
    response_headers text,
    response_body bytea
) WITH (
    fillfactor = 90,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.02,
    toast.autovacuum_vacuum_scale_factor = 0.02
)
