//! The limit of a PostgreSQL server: the rows a second that two backends insert without any client.
//!
//! 1. Each backend runs one procedure, which runs the adapter's own statement for several keys and commits
//!    after each. So it writes and syncs the same WAL as the adapter, and nothing crosses a socket.
//! 2. The text of the statement and the values that are the same for all keys come from the server's log of
//!    a short load on the adapter. Arrays whose values differ get new keys, tokens and ids.
//! 3. A batch has as many rows as an average batch of the adapter at that load.
//! 4. The procedure reads its batches into memory before its time begins.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Column, Either, Executor, PgPool, SqlSafeStr, Statement, TypeInfo};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::inspect::MaintenanceAdapter;

use crate::shared::calls::{Claims, Ours, callers};
use crate::shared::database::{Database, Schema};
use crate::shared::rounds::{Load, load};

/// More than a backend inserts.
const ROWS_PER_SECOND: f64 = 250_000.0;
/// The length of a load from which a statement or a batch size is taken.
const SAMPLE: Duration = Duration::from_millis(500);

/// The procedure, for one adapter's table and one number of callers.
pub(crate) struct Limit {
    pool: PgPool,
    time: Duration,
    /// How many rows a batch has.
    pub(crate) batch: u64,
}

impl Limit {
    /// Makes the procedure in the schema of the adapter.
    ///
    /// # Errors
    ///
    /// Says why the limit cannot be measured: the log is unknown, or the statement has parameters of a kind
    /// that this file does not know.
    pub(crate) async fn new(
        database: &Database,
        schema: &Schema,
        adapter: &PostgresAdapter,
        pool: &PgPool,
        count: usize,
        time: Duration,
    ) -> Result<Self, String> {
        let sent = logged(database, schema, count).await?;
        let batch = batch_size(adapter, pool, count).await?;
        let prepared = pool.prepare(AssertSqlSafe(sent.sql.clone()).into_sql_str()).await;
        let prepared = prepared.map_err(|error| format!("preparing the statement: {error}"))?;
        let Some(Either::Left(types)) = prepared.parameters() else {
            return Err("the statement's parameters have no types".to_owned());
        };
        let types: Vec<&str> = types.iter().map(TypeInfo::name).collect();
        let columns = prepared.columns().iter();
        let columns: Vec<&str> = columns.map(|column| column.type_info().name()).collect();
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let batches = time.as_secs_f64() * ROWS_PER_SECOND / batch as f64;
        for sql in procedure(&sent, &types, &columns, batch, batches.ceil())? {
            let made = pool.execute(AssertSqlSafe(sql.clone())).await;
            made.map_err(|error| format!("{error}, in: {sql}"))?;
        }
        let limit = Self { pool: pool.clone(), time, batch };
        // The rows of this run stay, so a measurement empties the table first.
        limit.call(0, Duration::from_millis(50)).await?;
        Ok(limit)
    }

    /// Runs the procedure in both backends. A call is a row. The latency is not measured, and the rate is no
    /// number if the procedure failed.
    pub(crate) async fn load(&self) -> Load {
        let backend = async |which| {
            let rate = self.call(which, self.time).await;
            rate.inspect_err(|why| eprintln!("no limit: {why}")).unwrap_or(f64::NAN)
        };
        let (one, other) = tokio::join!(backend(0), backend(1));
        let per_second = one + other;
        let calls = per_second * self.time.as_secs_f64();
        Load { calls, per_second, p50: Duration::ZERO }
    }

    async fn call(&self, backend: i32, time: Duration) -> Result<f64, String> {
        let call = sqlx::query_scalar("CALL dedup_limit($1, $2, NULL)");
        // The procedure is made anew for another number of callers.
        let call = call.bind(backend).bind(time.as_secs_f64()).persistent(false);
        let rate = call.fetch_one(&self.pool).await;
        rate.map_err(|error| format!("the procedure: {error}"))
    }
}

/// A statement as the server has logged it.
#[derive(Debug, PartialEq, Eq)]
struct Logged {
    sql: String,
    /// The values of its parameters. `None` is NULL.
    values: Vec<Option<String>>,
}

/// Returns the statement for several new keys that an adapter sends.
async fn logged(database: &Database, schema: &Schema, count: usize) -> Result<Logged, String> {
    let length = database.log().ok_or("the log of the server is unknown")?.len();
    let url = format!("{}&options[log_statement]=all", schema.url());
    let adapter = PostgresAdapter::connect(&url).await.map_err(|error| error.to_string())?;
    load(callers(count, Claims(Ours(adapter.clone()))), SAMPLE).await;
    adapter.close().await;
    let log = database.log().ok_or("the log of the server is unknown")?;
    statement_of(log.get(length..).unwrap_or_default())
        .ok_or_else(|| "the log shows no statement that inserts several keys".to_owned())
}

/// Returns the last statement of a log that inserts several keys.
fn statement_of(log: &str) -> Option<Logged> {
    // The lines of an entry after its first line begin with a tab.
    let log = log.replace("\n\t", "\r");
    let mut found = None;
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        let sql = line.split_once("LOG:  execute ").and_then(|(_, rest)| rest.split_once(": "));
        let values = lines.peek().and_then(|line| line.split_once("arameters: "));
        let (Some((_, sql)), Some((_, values))) = (sql, values) else { continue };
        let values = parse_values(values);
        let has_several =
            values.iter().flatten().any(|value| items(value).is_some_and(|items| items.len() > 1));
        if sql.contains("INSERT INTO") && has_several {
            found = Some(Logged { sql: sql.replace('\r', "\n"), values });
        }
    }
    found
}

/// Parses `$1 = '{a,b}', $2 = NULL`.
fn parse_values(mut text: &str) -> Vec<Option<String>> {
    let mut values = Vec::new();
    while let Some((_, rest)) = text.split_once(" = ") {
        let Some(mut rest) = rest.strip_prefix('\'') else {
            values.push(None);
            text = rest;
            continue;
        };
        let mut value = String::new();
        while let Some((part, after)) = rest.split_once('\'') {
            value.push_str(part);
            rest = after;
            // Two quotes are one.
            let Some(after) = rest.strip_prefix('\'') else { break };
            value.push('\'');
            rest = after;
        }
        values.push(Some(value));
        text = rest;
    }
    values
}

/// Returns the items of an array, as in `{a,b}`.
fn items(value: &str) -> Option<Vec<&str>> {
    Some(value.strip_prefix('{')?.strip_suffix('}')?.split(',').collect())
}

/// Returns the mean number of keys in a batch, from the number of transactions of a load.
async fn batch_size(adapter: &PostgresAdapter, pool: &PgPool, count: usize) -> Result<u64, String> {
    let transactions = async || {
        let next = sqlx::query_scalar("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8");
        let next: Result<i64, sqlx::Error> = next.fetch_one(pool).await;
        next.map_err(|error| error.to_string())
    };
    // As a warm-up.
    load(callers(count, Claims(Ours(adapter.clone()))), SAMPLE).await;
    let before = transactions().await?;
    let load = load(callers(count, Claims(Ours(adapter.clone()))), SAMPLE).await;
    let made = transactions().await? - before;
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² transactions")]
    let mean = (load.calls / made as f64).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded")]
    let batch = mean as u64;
    if batch > 1 { Ok(batch) } else { Err(format!("a batch has {mean} keys")) }
}

/// Returns the SQL that makes the batches and the procedures.
fn procedure(
    sent: &Logged,
    types: &[&str],
    columns: &[&str],
    batch: u64,
    batches: f64,
) -> Result<Vec<String>, String> {
    if sent.values.len() != types.len() {
        return Err(format!("{} values for {} parameters", sent.values.len(), types.len()));
    }
    let all: Result<Vec<_>, _> =
        types.iter().zip(&sent.values).map(|it| values(it, batch)).collect();
    let all = all?;
    let names = |prefix: &str| {
        let names = (1..=types.len()).map(|number| format!("{prefix}{number}"));
        names.collect::<Vec<_>>().join(", ")
    };
    let fields: Vec<_> =
        types.iter().zip(1..).map(|(of, number)| format!("p{number} {of}")).collect();
    // `$1` in the text is the first parameter of the function.
    let (returns, run) = if columns.is_empty() {
        let count = "DECLARE written int8; BEGIN {}; GET DIAGNOSTICS written = ROW_COUNT; RETURN written; END";
        ("int8".to_owned(), count.replace("{}", &sent.sql))
    } else {
        let columns = columns.iter().zip(1..).map(|(of, number)| format!("out_{number} {of}"));
        let columns: Vec<_> = columns.collect();
        (format!("TABLE ({})", columns.join(", ")), format!("BEGIN RETURN QUERY {}; END", sent.sql))
    };
    let written = if columns.is_empty() { "max(written)" } else { "count(*)" };
    let [types, fields, p, of_batch, all] =
        [types.join(", "), fields.join(", "), names("p"), names("b.p"), all.join(", ")];
    Ok(vec![
        "DROP ROUTINE IF EXISTS dedup_batch, dedup_limit".to_owned(),
        "DROP TABLE IF EXISTS dedup_batches".to_owned(),
        format!("CREATE UNLOGGED TABLE dedup_batches (backend int, {fields})"),
        format!(
            "INSERT INTO dedup_batches (backend, {p}) SELECT backend, {all} \
             FROM generate_series(0, 1) AS backend, generate_series(1, {batches}) AS number"
        ),
        format!(
            "CREATE FUNCTION dedup_batch({types}) RETURNS {returns} LANGUAGE plpgsql AS $limit${run}$limit$"
        ),
        format!(
            "CREATE PROCEDURE dedup_limit(which int, seconds float8, INOUT per_second float8) \
             LANGUAGE plpgsql AS $limit$ \
             DECLARE b dedup_batches; batches dedup_batches[]; started timestamptz; \
               passed float8; total float8 := 0; n int8; \
             BEGIN \
               SELECT array_agg(of_backend) INTO batches \
               FROM dedup_batches AS of_backend WHERE of_backend.backend = which; \
               COMMIT; \
               started := clock_timestamp(); \
               FOR number IN 1..cardinality(batches) LOOP \
                 b := batches[number]; \
                 SELECT {written} INTO n FROM dedup_batch({of_batch}) AS written; \
                 COMMIT; \
                 IF n <> {batch} THEN RAISE EXCEPTION '% of {batch} rows are new', n; END IF; \
                 total := total + n; \
                 passed := extract(epoch FROM clock_timestamp() - started); \
                 EXIT WHEN passed >= seconds; \
               END LOOP; \
               per_second := total / passed; \
             END $limit$"
        ),
    ])
}

/// Returns the expression for one parameter of a batch.
fn values((of, value): (&&str, &Option<String>), batch: u64) -> Result<String, String> {
    let Some(value) = value else { return Ok(format!("NULL::{of}")) };
    let quoted = |value: &str| format!("'{}'", value.replace('\'', "''"));
    let Some(items) = of.ends_with("[]").then(|| items(value)).flatten() else {
        return Ok(format!("{}::{of}", quoted(value)));
    };
    if items.iter().all(|item| *item == items[0]) {
        let item = of.trim_end_matches("[]");
        return Ok(format!("array_fill({}::{item}, ARRAY[{batch}])", quoted(items[0])));
    }
    // The ids have 28 bytes, like those of the callers. Both subqueries run again for each batch, because
    // they refer to it.
    let each = match *of {
        "UUID[]" => "gen_random_uuid()",
        "TEXT[]" => "'evt_' || substr(replace(gen_random_uuid()::text, '-', ''), 1, 24)",
        other => return Err(format!("an array of {other} with different values")),
    };
    Ok(format!(
        "(SELECT array_agg(item ORDER BY item) FROM (SELECT {each} AS item \
         FROM generate_series(1, {batch}) WHERE backend + number > 0) AS items)"
    ))
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    let entry = |sql: &str, values: &str| {
        format!(
            "1 UTC [7] LOG:  execute sqlx_s_1: {sql}\n1 UTC [7] DETAIL:  parameters: {values}\n"
        )
    };
    let one = entry("INSERT INTO t VALUES ($1)", "$1 = 'a'");
    let many =
        entry("INSERT INTO t\n\tSELECT $1", "$1 = '{a,b}', $2 = NULL, $3 = 'it''s', $4 = '{1,1}'");
    let log = format!("{one}{many}{one}1 UTC [7] LOG:  statement: SELECT '{{a,b}}'\n");
    let sent = statement_of(&log).expect("a statement");
    let owned = |value: &str| Some(value.to_owned());
    let expected = vec![owned("{a,b}"), None, owned("it's"), owned("{1,1}")];
    assert_eq!(sent, Logged { sql: "INSERT INTO t\nSELECT $1".to_owned(), values: expected });
    assert_eq!(statement_of(&one), None);

    let types = ["TEXT[]", "INT8", "TEXT", "INT8[]"];
    let sql = procedure(&sent, &types, &["UUID"], 5, 9.0).expect("known types").join(";\n");
    for part in ["NULL::INT8", "'it''s'::TEXT", "array_fill('1'::INT8, ARRAY[5])", "'evt_' ||"] {
        assert!(sql.contains(part), "{part}: {sql}");
    }
    assert!(sql.contains("RETURN QUERY INSERT INTO t\nSELECT $1; END"), "{sql}");
    let varied = Logged { sql: String::new(), values: vec![owned("{1,2}")] };
    assert!(procedure(&varied, &["INT8[]"], &[], 5, 9.0).is_err());
    assert!(procedure(&varied, &[], &[], 5, 9.0).is_err());
}
