-- Records a key in the caller's transaction: complete at once, by the rules of `record_in`. State 1 is leased, 4 is
-- complete, 5 is expired.
DECLARE
  stored_id text;
  hex text;
  row_key uuid;
  retention interval;
  known_version bigint;
  known_state integer;
BEGIN
  IF $1 IS NULL OR $2 IS NULL OR $3 IS NULL THEN
    RAISE EXCEPTION 'recording a key: an argument is null' USING ERRCODE = 'null_value_not_allowed';
  END IF;
  -- As in `DedupKey::new`. Control characters are looked for in the bytes, because the encoding may be SQL_ASCII.
  IF octet_length(convert_to($1, 'UTF8')) NOT BETWEEN 1 AND 64
    OR encode(convert_to($1, 'UTF8'), 'hex') ~ '^(..)*([01].|7f|c2[89].)' THEN
    RAISE EXCEPTION 'recording a key: the namespace is not 1 to 64 bytes without control characters'
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $2 = '' THEN
    RAISE EXCEPTION 'recording a key: the id is empty' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $3 = 'NaN' OR $3 <= 0 THEN
    RAISE EXCEPTION 'recording a key: the retention is not positive' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  -- A standby may know keys that its primary loses.
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION 'recording a key: the server is a standby' USING ERRCODE = 'read_only_sql_transaction';
  END IF;
  stored_id := CASE WHEN octet_length(convert_to($2, 'UTF8')) > {max_id_len}
    THEN encode(sha256(convert_to($2, 'UTF8')), 'hex') ELSE $2 END;
  hex := left(encode(sha256(convert_to($1 || chr(10) || stored_id, 'UTF8')), 'hex'), 32);
  row_key := hex::uuid;
  retention := least($3, {max_seconds}) * interval '1 second';
  FOR try IN 1 .. {tries} LOOP
    SELECT t.version, {state} INTO known_version, known_state
      FROM {table} AS t, (SELECT clock_timestamp() AS now) AS c
      WHERE t.key = row_key;
    IF known_state = 4 THEN
      RETURN 'duplicate';
    END IF;
    IF known_state = 1 THEN
      RETURN 'in_flight';
    END IF;
    -- A lock is only tried for: its holder may be a handler.
    IF NOT pg_try_advisory_xact_lock(('x' || right(hex, 16))::bit(64)::bigint # {table_number}::oid::int8) THEN
      RETURN 'in_flight';
    END IF;
    IF known_state IS NULL THEN
      INSERT INTO {table} (
        key, namespace, id, token, lease_until, attempts, takeover,
        first_seen_at, completed_at, expires_at
      ) VALUES (
        row_key, $1, stored_id, gen_random_uuid(), NULL, 1, false,
        clock_timestamp(), clock_timestamp(), clock_timestamp() + retention
      ) ON CONFLICT (key) DO NOTHING;
    ELSE
      UPDATE {table} AS t SET
        version = t.version + 1,
        token = gen_random_uuid(),
        lease_until = NULL,
        attempts = CASE WHEN known_state = 5 THEN 1 ELSE t.attempts + 1 END,
        takeover = known_state <> 5 AND t.lease_until IS NOT NULL,
        first_seen_at = CASE WHEN known_state = 5 THEN clock_timestamp() ELSE t.first_seen_at END,
        completed_at = clock_timestamp(),
        expires_at = clock_timestamp() + retention,
        event_type = CASE WHEN known_state = 5 THEN NULL ELSE t.event_type END,
        payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
      WHERE t.key = row_key AND t.version = known_version;
    END IF;
    IF FOUND THEN
      PERFORM {durable};
      RETURN 'first';
    END IF;
  END LOOP;
  RETURN 'in_flight';
EXCEPTION WHEN lock_not_available THEN
  -- An open transaction holds the row without a lock of the key's, or DDL holds the table.
  RETURN 'in_flight';
END
