-- The table of the inbox. One process of several that start at once makes it; a simple query is one transaction.
SELECT pg_advisory_xact_lock(hashtext('tower-dedup-inbox'));
CREATE TABLE IF NOT EXISTS {table} (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  -- SHA-256: service, keys, method, target, body, and the headers that all attempts share.
  key bytea NOT NULL UNIQUE,
  service text NOT NULL,
  namespace text NOT NULL,
  -- A line for each identity of each event: namespace, tab, id.
  keys text NOT NULL,
  event_type text,
  -- Once more with each delivery of the sender.
  received timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- When it runs; while it runs, when its turn lapses; null: parked.
  due timestamptz,
  parked text,
  -- Names the run.
  turn bytea,
  -- Rises with each delivery that is answered *stored*.
  version bigint NOT NULL DEFAULT 1,
  format smallint NOT NULL,
  attempts integer NOT NULL DEFAULT 0,
  deaths integer NOT NULL DEFAULT 0,
  misrouted integer NOT NULL DEFAULT 0,
  -- The sender has got a 2xx. Written before it leaves.
  answered boolean NOT NULL DEFAULT false,
  method text NOT NULL,
  target bytea NOT NULL,
  headers bytea NOT NULL,
  body bytea NOT NULL,
  -- The name of the verification that the request has passed.
  verified text,
  last text,
  -- What the table may have at most is a sum of these: its file does not shrink.
  bytes bigint GENERATED ALWAYS AS (octet_length(headers) + octet_length(body)) STORED
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_analyze_scale_factor = 0.05,
  toast.autovacuum_vacuum_scale_factor = 0.01);
-- Most rows live for milliseconds: compressing a large body would cost three times what the rest of the row costs. (A column
-- of CREATE TABLE has a storage from Postgres 16 on.)
DO $$ BEGIN
  IF (SELECT attstorage <> 'e' FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attname = 'body') THEN
    ALTER TABLE {table} ALTER COLUMN body SET STORAGE EXTERNAL;
  END IF;
END $$;
CREATE INDEX IF NOT EXISTS "{index}_due" ON {table} (service, namespace, due) INCLUDE (received, bytes)
  WHERE due IS NOT NULL;
CREATE INDEX IF NOT EXISTS "{index}_parked" ON {table} (service, namespace, parked, received)
  INCLUDE (bytes) WHERE parked IS NOT NULL;
