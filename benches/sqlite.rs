//! The SQLite adapter at `synchronous = FULL`, against one insert per commit.
//!
//! `cargo bench --bench sqlite` takes a minute, or some seconds with `--quick`. The baseline is a pool of
//! one connection in WAL mode, the fastest choice: several connections wait for each other with pauses,
//! or fail. Every measurement has a new file in the target folder.
//!
//! Under `cargo test`, it runs one short round of both.

use std::path::Path;

use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use tempfile::TempDir;
use tower_dedup::adapter::{MaintenanceAdapter, SqliteAdapter, Token};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{Claims, Ours, callers, fresh_key};
use shared::database::warn_of_memory;
use shared::goals::grouped;
use shared::ratios::{heading, report};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};

const CALLERS: usize = 64;

const INSERT: &str = "INSERT INTO webhook_deliveries \
    (namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at) \
    VALUES (?1, ?2, ?3, unixepoch() * 1000 + 60000, 1, 0, unixepoch() * 1000, \
    unixepoch() * 1000 + 2592000000) ON CONFLICT DO NOTHING";

fn main() {
    let run = Run::from_args();
    if !run.wants(&["sqlite_claim_64"]) {
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if !run.is_test() {
        warn_of_memory(folder);
    }
    let rounds: Vec<[Load; 2]> = runtime().block_on(in_turn(&run, async |which| {
        let dir = tempfile::tempdir_in(folder).expect("a folder");
        if which == 0 { ours(&run, &dir).await } else { baseline(&run, &dir).await }
    }));
    heading(&run, "claims of new keys on SQLite, over one insert a commit, 64 callers");
    let ratios: Vec<f64> =
        rounds.iter().map(|[ours, baseline]| ours.per_second / baseline.per_second).collect();
    let [ours, baseline] =
        [0, 1].map(|side| grouped(median(rounds.iter().map(|round| round[side].per_second))));
    report(&run, "sqlite_claim_64", &ratios, &format!("{ours} over {baseline} a second"));
}

async fn ours(run: &Run, dir: &TempDir) -> Load {
    let url = format!("sqlite://{}", dir.path().join("ours.db").display());
    let adapter = SqliteAdapter::connect(&url).await.expect("a file");
    adapter.migrate().await.expect("a table");
    let load = load(callers(CALLERS, Claims(Ours(adapter.clone()))), run.time()).await;
    adapter.close().await;
    load
}

async fn baseline(run: &Run, dir: &TempDir) -> Load {
    let options = SqliteConnectOptions::new()
        .filename(dir.path().join("baseline.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(1).test_before_acquire(false);
    let pool = pool.connect_with(options).await.expect("a file");
    // The table has the adapter's layout.
    SqliteAdapter::new(pool.clone()).migrate().await.expect("a table");
    let load = load(callers(CALLERS, Inserts(pool.clone())), run.time()).await;
    pool.close().await;
    load
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
