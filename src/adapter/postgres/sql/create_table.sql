CREATE TABLE IF NOT EXISTS {table} (
    key uuid PRIMARY KEY,
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
) WITH (fillfactor = 90)
