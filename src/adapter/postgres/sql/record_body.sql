DECLARE
  stored_id text;
  hex text;
  row_key uuid;
  retention interval;
  is_locked boolean := false;
  known_version bigint;
  known_state integer;
  known_expired boolean;
  is_known boolean;
  lock_timeout_before text;
  written bigint;
BEGIN
  IF $1 IS NULL OR $2 IS NULL OR $3 IS NULL THEN
    RAISE EXCEPTION 'recording a key: an argument is null' USING ERRCODE = 'null_value_not_allowed';
  END IF;
  -- As in `DedupKey::new`.
  IF octet_length(convert_to($1, 'UTF8')) NOT BETWEEN 1 AND 64
    OR $1 ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
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
  hex := left(encode(sha256(convert_to($1 || E'\n' || stored_id, 'UTF8')), 'hex'), 32);
  row_key := hex::uuid;
  retention := least($3, {max_seconds}) * interval '1 second';
  FOR try IN 1 .. {tries} LOOP
    SELECT t.version, {state}, t.expires_at <= c.now
      INTO known_version, known_state, known_expired
      FROM {table} AS t, (SELECT clock_timestamp() AS now) AS c
      WHERE t.key = row_key;
    is_known := FOUND;
    IF is_known AND known_state = 4 THEN
      RETURN 'duplicate';
    ELSIF is_known AND known_state = 1 THEN
      RETURN 'in_flight';
    END IF;
    -- A lock is only tried for: its holder may be a handler.
    is_locked := is_locked
      OR pg_try_advisory_xact_lock(('x' || right(hex, 16))::bit(64)::bigint # {table_number}::oid::int8);
    IF NOT is_locked THEN
      RETURN 'in_flight';
    END IF;
    lock_timeout_before := current_setting('lock_timeout');
    BEGIN
      PERFORM set_config('lock_timeout', '{lock_timeout}', true), {durable};
      IF is_known THEN
        UPDATE {table} AS t SET
          version = t.version + 1,
          token = gen_random_uuid(),
          attempts = CASE WHEN known_expired THEN 1 ELSE t.attempts + 1 END,
          takeover = NOT known_expired AND t.lease_until IS NOT NULL,
          lease_until = NULL,
          first_seen_at = CASE WHEN known_expired THEN clock_timestamp() ELSE t.first_seen_at END,
          completed_at = clock_timestamp(),
          expires_at = clock_timestamp() + retention,
          event_type = CASE WHEN known_expired THEN NULL ELSE t.event_type END,
          payload_sha256 = NULL, response_status = NULL, response_headers = NULL, response_body = NULL
        WHERE t.key = row_key AND t.version = known_version;
      ELSE
        INSERT INTO {table} (
          key, namespace, id, token, lease_until, attempts, takeover,
          first_seen_at, completed_at, expires_at
        ) VALUES (
          row_key, $1, stored_id, gen_random_uuid(), NULL, 1, false,
          clock_timestamp(), clock_timestamp(), clock_timestamp() + retention
        ) ON CONFLICT (key) DO NOTHING;
      END IF;
      GET DIAGNOSTICS written = ROW_COUNT;
      PERFORM set_config('lock_timeout', lock_timeout_before, true);
    EXCEPTION WHEN lock_not_available THEN
      -- An open transaction holds the row without a lock of the key's.
      RETURN 'in_flight';
    END;
    IF written = 1 THEN
      RETURN 'first';
    END IF;
  END LOOP;
  RETURN 'in_flight';
END
