//! Claims, duplicates, a purge, VACUUM and statistics on Postgres beside very many rows.
//!
//! `cargo bench --bench large -- --rows=100000000`, or `scripts/large`, which looks at the free disk
//! first. Without `--rows`, and under `cargo test`, it does nothing. It prints one row of a Markdown table
//! for each step. Nothing here is a ratio: the figures are for planning, and depend on the machine.
//!
//! The rows are loaded before the primary key is built, because random insertions into a large index take
//! ten times as long. So the index begins denser than a grown one.

use std::time::{Duration, Instant};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{Claims, Duplicates, Events, NAMESPACE, Ours, Store, callers, old_id};
use shared::database::Database;
use shared::goals::grouped;
use shared::rounds::{Caller, Load, load, median};
use shared::run::runtime;
use sqlx::{AssertSqlSafe, Executor, PgPool};
use tower_dedup::DedupKey;
use tower_dedup::adapter::inspect::{KeyState, ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions, Purging};

const CALLERS: usize = 64;
const TIME: Duration = Duration::from_secs(5);
const ROUNDS: usize = 5;
/// One row in this many has expired.
const EXPIRED: u64 = 100;
const CHUNK: u64 = 2_000_000;

fn main() {
    let rows = std::env::args().find_map(|arg| arg.strip_prefix("--rows=").map(str::to_owned));
    let Some(rows) = rows else { return };
    let rows: u64 = rows.parse().expect("a number of rows");
    let database = Database::start();
    runtime().block_on(measure(&database, rows));
}

async fn measure(database: &Database, rows: u64) {
    let (schema, _) = database.adapter().await;
    let pool = PgPool::connect(&schema.url()).await.expect("PostgreSQL");
    // The purge is measured, so no task purges beside it.
    let options = PostgresOptions::new().purging(Purging::off());
    let adapter = PostgresAdapter::with_options(pool.clone(), options);
    println!("\n| beside {} rows | |\n|---|---|", grouped_u64(rows));

    let start = Instant::now();
    fill(&pool, rows).await;
    line("load", &seconds(start));
    let start = Instant::now();
    run(
        &pool,
        "SET maintenance_work_mem = '1GB'; ALTER TABLE webhook_deliveries ADD PRIMARY KEY (key); \
         CREATE INDEX webhook_deliveries_expires_at ON webhook_deliveries (expires_at)",
    )
    .await;
    line("build of the indexes", &seconds(start));
    let start = Instant::now();
    run(&pool, "VACUUM (ANALYZE, FREEZE) webhook_deliveries").await;
    run(&pool, "CHECKPOINT").await;
    line("VACUUM (ANALYZE, FREEZE)", &seconds(start));
    sizes(&pool, rows, "").await;

    let ours = Ours(adapter.clone());
    for number in [rows / EXPIRED + 1, rows / 2, rows] {
        ours.duplicate(&DedupKey::new(NAMESPACE, &old_id(number)).expect("a key")).await;
    }
    rate("claims a second, 64 callers", Claims(ours.clone())).await;
    rate("claims and completions a second, 64 callers", Events(ours.clone())).await;
    // The expired rows are no duplicates.
    let keys = rows - rows / EXPIRED;
    rate("duplicates a second, 64 callers", Recent(Duplicates { store: ours, keys }, rows)).await;

    let start = Instant::now();
    let stats = adapter.stats().await.expect("statistics");
    line("`stats`", &format!("{}; {stats:?}", millis(start)));
    list(&adapter).await;
    purge(&adapter, &pool).await;
    let start = Instant::now();
    run(&pool, "VACUUM webhook_deliveries").await;
    line("VACUUM after the purge", &seconds(start));
    // With the keys that were claimed meanwhile.
    sizes(&pool, stats.rows, " after all").await;
}

/// Claims complete keys that have not expired: those with high numbers.
#[derive(Clone)]
struct Recent<S>(Duplicates<S>, u64);

impl<S: Store> Caller for Recent<S> {
    async fn call(&mut self) {
        let Self(duplicates, rows) = self;
        let number = rand::random_range(*rows - duplicates.keys + 1..=*rows);
        let key = DedupKey::new(NAMESPACE, &old_id(number));
        duplicates.store.duplicate(&key.expect("a key")).await;
    }
}

async fn rate<C: Caller + Clone>(name: &str, caller: C) {
    load(callers(CALLERS, caller.clone()), TIME).await;
    let mut loads: Vec<Load> = Vec::new();
    for _ in 0..ROUNDS {
        loads.push(load(callers(CALLERS, caller.clone()), TIME).await);
    }
    let rate = median(loads.iter().map(|load| load.per_second));
    let p50 = median(loads.iter().map(|load| load.p50.as_secs_f64() * 1e3));
    line(name, &format!("{} (p50 {p50:.2} ms)", grouped(rate)));
}

/// Lists the keys in flight, of which there are few: the list reads the whole table.
async fn list(adapter: &PostgresAdapter) {
    let mut filter = ListFilter::default();
    filter.state = Some(KeyState::InFlight);
    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    let (mut calls, mut found, mut after) = (0_u64, 0, None);
    loop {
        let call = Instant::now();
        let listing = adapter.list(&filter, after.as_deref(), 1_000).await.expect("a list");
        slowest = slowest.max(call.elapsed());
        (calls, found, after) = (calls + 1, found + listing.keys.len() as u64, listing.next);
        if after.is_none() {
            break;
        }
    }
    let all = format!(
        "{} keys in {} ({} calls, the slowest {:.0} ms)",
        grouped_u64(found),
        seconds(start),
        grouped_u64(calls),
        slowest.as_secs_f64() * 1e3
    );
    line("`list` of the keys in flight", &all);
}

/// Purges as a round of the adapter's own task does.
async fn purge(adapter: &PostgresAdapter, pool: &PgPool) {
    let before = wal(pool).await;
    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    let (mut calls, mut deleted) = (0_u64, 0);
    loop {
        let step = Instant::now();
        let purged = adapter.purge(1_000).await.expect("a purge");
        slowest = slowest.max(step.elapsed());
        (calls, deleted) = (calls + 1, deleted + purged);
        if purged < 1_000 {
            break;
        }
    }
    let bytes = wal(pool).await - before;
    let all = format!(
        "{} keys in {} ({} calls, the slowest {:.0} ms), {} MB of WAL",
        grouped_u64(deleted),
        seconds(start),
        grouped_u64(calls),
        slowest.as_secs_f64() * 1e3,
        bytes / 1_000_000
    );
    line("a round of the purge", &all);
}

async fn wal(pool: &PgPool) -> i64 {
    let wal = sqlx::query_scalar("SELECT (pg_current_wal_lsn() - '0/0')::int8");
    wal.fetch_one(pool).await.expect("a position")
}

async fn sizes(pool: &PgPool, rows: u64, when: &str) {
    for (name, function) in [("table", "pg_table_size"), ("indexes", "pg_indexes_size")] {
        let size = AssertSqlSafe(format!("SELECT {function}('webhook_deliveries')"));
        let bytes: i64 = sqlx::query_scalar(size).fetch_one(pool).await.expect("a size");
        let each = u64::try_from(bytes).expect("a size") / rows;
        line(
            &format!("{name}{when}"),
            &format!("{:.1} GB, {each} bytes a row", bytes as f64 / 1e9),
        );
    }
}

/// Loads complete rows, 0.02 s apart; the first ones have expired. Without indexes.
async fn fill(pool: &PgPool, rows: u64) {
    for sql in [
        "ALTER SYSTEM SET max_wal_size = '8GB'",
        "SELECT pg_reload_conf()",
        "ALTER TABLE webhook_deliveries DROP CONSTRAINT webhook_deliveries_pkey",
        "DROP INDEX webhook_deliveries_expires_at",
    ] {
        run(pool, sql).await;
    }
    let expired = rows / EXPIRED;
    for start in (0..rows).step_by(usize::try_from(CHUNK).expect("a chunk")) {
        let end = rows.min(start + CHUNK);
        let fill = format!(
            "INSERT INTO webhook_deliveries (key, namespace, id, token, attempts, takeover, \
             first_seen_at, completed_at, expires_at) \
             SELECT encode(substring(sha256(convert_to('{NAMESPACE}' || E'\\n' || id, 'UTF8')) \
             FROM 1 FOR 16), 'hex')::uuid, '{NAMESPACE}', id, gen_random_uuid(), 1, false, \
             seen, seen, CASE WHEN number <= {expired} THEN now() - interval '2 hours' \
             ELSE now() + interval '60 days' END \
             FROM (SELECT number, 'old_' || lpad(number::text, 24, '0') AS id, \
             now() - ({rows} - number) * interval '0.02 seconds' AS seen \
             FROM generate_series({start} + 1, {end}) AS number) AS old"
        );
        run(pool, &fill).await;
        if end.is_multiple_of(10_000_000) {
            eprintln!("{} rows", grouped_u64(end));
        }
    }
}

async fn run(pool: &PgPool, sql: &str) {
    pool.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.expect("SQL");
}

fn line(name: &str, value: &str) {
    println!("| {name} | {value} |");
}

fn seconds(start: Instant) -> String {
    format!("{:.1} s", start.elapsed().as_secs_f64())
}

fn millis(start: Instant) -> String {
    format!("{:.0} ms", start.elapsed().as_secs_f64() * 1e3)
}

#[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² rows")]
fn grouped_u64(number: u64) -> String {
    grouped(number as f64)
}
