-- The table of the inbox. Times are milliseconds since 1970, by the clock of the machine. The columns are those of Postgres.
CREATE TABLE IF NOT EXISTS {table} (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  key BLOB NOT NULL UNIQUE,
  service TEXT NOT NULL,
  namespace TEXT NOT NULL,
  keys TEXT NOT NULL,
  event_type TEXT,
  received INTEGER NOT NULL,
  due INTEGER,
  parked TEXT,
  turn BLOB,
  version INTEGER NOT NULL DEFAULT 1,
  format INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  deaths INTEGER NOT NULL DEFAULT 0,
  misrouted INTEGER NOT NULL DEFAULT 0,
  answered INTEGER NOT NULL DEFAULT 0,
  method TEXT NOT NULL,
  target TEXT NOT NULL,
  headers BLOB NOT NULL,
  body BLOB NOT NULL,
  verified TEXT,
  last TEXT,
  bytes INTEGER NOT NULL GENERATED ALWAYS AS (length(headers) + length(body)) STORED
) STRICT;
CREATE INDEX IF NOT EXISTS "{index}_due" ON {table} (service, namespace, due, received, bytes)
  WHERE due IS NOT NULL;
CREATE INDEX IF NOT EXISTS "{index}_parked" ON {table} (service, namespace, parked, received, bytes)
  WHERE parked IS NOT NULL;
