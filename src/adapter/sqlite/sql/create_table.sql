CREATE TABLE IF NOT EXISTS {table} (
    namespace TEXT NOT NULL,
    id TEXT NOT NULL,
    token BLOB,
    lease_until INTEGER,
    attempts INTEGER NOT NULL,
    takeover INTEGER NOT NULL,
    first_seen_at INTEGER NOT NULL,
    completed_at INTEGER,
    expires_at INTEGER NOT NULL,
    event_type TEXT,
    payload_sha256 BLOB,
    response_status INTEGER,
    response_headers TEXT,
    response_body BLOB,
    PRIMARY KEY (namespace, id)
) WITHOUT ROWID
