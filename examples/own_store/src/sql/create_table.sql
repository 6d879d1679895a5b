-- Names, ids and types are bytes: a collation would take two keys for one. Times are milliseconds since the Unix epoch.
-- `version` is the fence: every write raises it.
CREATE TABLE IF NOT EXISTS {table} (
  namespace VARBINARY(64) NOT NULL,
  id VARBINARY(255) NOT NULL,
  version BIGINT NOT NULL,
  token BINARY(16) NULL,
  lease_until BIGINT NULL,
  attempts BIGINT NOT NULL,
  takeover BOOLEAN NOT NULL,
  first_seen_at BIGINT NOT NULL,
  completed_at BIGINT NULL,
  expires_at BIGINT NOT NULL,
  event_type VARBINARY(255) NULL,
  payload_sha256 BINARY(32) NULL,
  response_status BIGINT NULL,
  response_headers LONGBLOB NULL,
  response_body LONGBLOB NULL,
  PRIMARY KEY (namespace, id),
  KEY (expires_at)
) ENGINE = InnoDB
