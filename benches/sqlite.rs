//! The SQLite adapter at `synchronous = FULL`, against one insert per commit.
//!
//! `cargo bench --bench sqlite` takes two minutes, or some seconds with `--quick`. The baseline is a pool of
//! one connection in WAL mode, the fastest choice: several connections wait for each other with pauses,
//! or fail. Every measurement has a new file in the target folder.
//!
//! The limit is one caller with one connection. Each of its statements inserts as many keys as an average
//! batch of the adapter, and is one commit with one sync. The text of a batch is made before its time begins.
//!
//! Under `cargo test`, it runs one short round of all three.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use tempfile::TempDir;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::Token;
use tower_dedup::adapter::inspect::MaintenanceAdapter;

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{Claims, NAMESPACE, Ours, callers, fresh_id, fresh_key};
use shared::disk::print_sync_time;
use shared::goals::grouped;
use shared::ratios::{heading, report};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};

const CALLERS: usize = 64;

const INSERT: &str = "INSERT INTO webhook_deliveries \
    (namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at) \
    VALUES (?1, ?2, ?3, unixepoch() * 1000 + 60000, 1, 0, unixepoch() * 1000, \
    unixepoch() * 1000 + 2592000000) ON CONFLICT DO NOTHING";

/// One statement for many keys: an array of ids and tokens.
const INSERT_MANY: &str = "INSERT INTO webhook_deliveries \
    (namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at) \
    SELECT ?1, value ->> 0, unhex(value ->> 1), unixepoch() * 1000 + 60000, 1, 0, unixepoch() * 1000, \
    unixepoch() * 1000 + 2592000000 FROM json_each(?2) WHERE true ON CONFLICT DO NOTHING";

const NAMES: [&str; 2] = ["sqlite_claim_64", "sqlite_claim_64_of_limit"];

fn main() {
    let run = Run::from_args();
    if !run.wants(&NAMES) {
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if !run.is_test() {
        print_sync_time(folder);
    }
    // Of the adapter's last measurement.
    let batch = Cell::new(1.0);
    let rounds: Vec<[Load; 3]> = runtime().block_on(in_turn(&run, async |which| {
        let dir = tempfile::tempdir_in(folder).expect("a folder");
        match which {
            0 => ours(&run, &dir, &batch).await,
            1 => baseline(&run, &dir).await,
            _ => limit(&run, &dir, batch.get()).await,
        }
    }));
    heading(&run, "claims of new keys on SQLite, over one insert a commit, 64 callers");
    let side = |side: usize| rounds.iter().map(move |round| round[side].per_second);
    let [ours, baseline, limit] = [0, 1, 2].map(|which| grouped(median(side(which))));
    let ratios = |over: usize| -> Vec<f64> {
        side(0).zip(side(over)).map(|(ours, other)| ours / other).collect()
    };
    report(&run, NAMES[0], &ratios(1), &format!("{ours} over {baseline} a second"));
    let batch = batch.get();
    let note = format!("{ours} over {limit} a second, in batches of {batch:.0} keys");
    report(&run, NAMES[1], &ratios(2), &note);
}

/// Also notes how many keys an average batch has.
async fn ours(run: &Run, dir: &TempDir, batch: &Cell<f64>) -> Load {
    let file = dir.path().join("ours.db");
    let url = format!("sqlite://{}", file.display());
    let adapter = SqliteAdapter::connect(&url).await.expect("a file");
    adapter.migrate().await.expect("a table");
    let before = commits(&file);
    let load = load(callers(CALLERS, Claims(Ours(adapter.clone()))), run.time()).await;
    let commits = commits(&file).wrapping_sub(before);
    batch.set((load.calls / f64::from(commits)).round());
    adapter.close().await;
    load
}

/// Returns the number of commits, modulo 2³²: `iChange` in the header of the WAL index, see
/// <https://sqlite.org/walformat.html>.
///
/// Closing the index releases the locks of this process on it. No other process opens the file.
fn commits(file: &Path) -> u32 {
    let index = std::fs::read(file.with_extension("db-shm")).expect("a WAL index");
    let bytes = index.get(8..12).and_then(|bytes| bytes.try_into().ok());
    u32::from_ne_bytes(bytes.expect("a header"))
}

async fn baseline(run: &Run, dir: &TempDir) -> Load {
    let pool = pool(&dir.path().join("baseline.db")).await;
    let load = load(callers(CALLERS, Inserts(pool.clone())), run.time()).await;
    pool.close().await;
    load
}

/// Returns the load of one caller with statements for so many keys. The latency is that of a statement.
async fn limit(run: &Run, dir: &TempDir, batch: f64) -> Load {
    let pool = pool(&dir.path().join("limit.db")).await;
    let mut connection = pool.acquire().await.expect("a connection");
    let (mut statements, mut passed) = (0.0, Duration::ZERO);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few keys")]
    let size = batch as usize;
    while passed < run.time() {
        let mut rows: Vec<[String; 2]> = (0..size)
            .map(|_| {
                [fresh_id(), format!("{:032x}", u128::from_ne_bytes(*Token::random().as_bytes()))]
            })
            .collect();
        rows.sort();
        let rows = serde_json::to_string(&rows).expect("text");
        let start = Instant::now();
        let query = sqlx::query(INSERT_MANY).bind(NAMESPACE).bind(rows);
        let inserted = query.execute(&mut *connection).await.expect("an insert");
        passed += start.elapsed();
        statements += 1.0;
        assert_eq!(inserted.rows_affected(), size as u64);
    }
    drop(connection);
    pool.close().await;
    let calls = statements * batch;
    Load { calls, per_second: calls / passed.as_secs_f64(), p50: passed.div_f64(statements) }
}

/// Returns a pool of one connection to a new file with a table of the adapter's layout.
async fn pool(file: &Path) -> SqlitePool {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(1).test_before_acquire(false);
    let pool = pool.connect_with(options).await.expect("a file");
    SqliteAdapter::new(pool.clone()).migrate().await.expect("a table");
    pool
}

#[derive(Clone)]
struct Inserts(SqlitePool);

impl Caller for Inserts {
    async fn call(&mut self) {
        let key = fresh_key();
        let query = sqlx::query(INSERT).bind(key.namespace()).bind(key.id());
        let token = Token::random().as_bytes().to_vec();
        let inserted = query.bind(token).execute(&self.0).await.expect("an insert");
        assert_eq!(inserted.rows_affected(), 1);
    }
}
