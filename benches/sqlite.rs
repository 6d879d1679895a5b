//! The SQLite adapter at `synchronous = FULL`, against one statement per commit.
//!
//! `cargo bench --bench sqlite` takes two minutes, or 20 s with `--quick`. The baseline is a pool of
//! one connection in WAL mode, the fastest choice: several connections wait for each other with pauses,
//! or fail. Each side has a file of the same layout in the target folder, and 64 callers. Before every measurement, the
//! file is filled with 10,000 rows.
//!
//! Under `cargo test`, it runs one short round.

use std::path::Path;
use std::time::Duration;

use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use tower_dedup::DedupKey;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::Token;

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{Claims, Duplicates, Events, NAMESPACE, Ours, Store};
use shared::compare::{Bed, compare};
use shared::database::FEW;
use shared::run::{Run, runtime};

const INSERT: &str = "INSERT INTO webhook_deliveries \
    (namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at) \
    VALUES (?1, ?2, ?3, unixepoch() * 1000 + 60000, 1, 0, unixepoch() * 1000, \
    unixepoch() * 1000 + 2592000000) ON CONFLICT DO NOTHING";

const COMPLETE: &str = "UPDATE webhook_deliveries SET completed_at = unixepoch() * 1000, \
    lease_until = NULL WHERE namespace = ?1 AND id = ?2 AND token = ?3 AND completed_at IS NULL";

/// Inserts complete keys.
const FILL: &str = "INSERT INTO webhook_deliveries \
    (namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at) \
    WITH RECURSIVE numbers (number) AS \
    (VALUES (1) UNION ALL SELECT number + 1 FROM numbers WHERE number < ?2) \
    SELECT ?1, printf('old_%024d', number), randomblob(16), 1, 0, unixepoch() * 1000, \
    unixepoch() * 1000, unixepoch() * 1000 + 2592000000 FROM numbers";

fn main() {
    let run = Run::from_args();
    if !run.wants(&["sqlite_claim_64", "sqlite_event_64", "sqlite_duplicate_64"]) {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    runtime().block_on(async {
        let files = [dir.path().join("ours.db"), dir.path().join("baseline.db")];
        let url = format!("sqlite://{}", files[0].display());
        let adapter = SqliteAdapter::connect(&url).await.expect("a file");
        adapter.migrate().await.expect("a table");
        let bed = Files([pool(&files[0]).await, pool(&files[1]).await]);
        let (ours, baseline) = (Ours(adapter), OneByOne(bed.0[1].clone()));
        let claims = (Claims(ours.clone()), Claims(baseline.clone()));
        compare(&run, &bed, "sqlite_claim_64", claims.0, claims.1).await;
        let events = (Events(ours.clone()), Events(baseline.clone()));
        compare(&run, &bed, "sqlite_event_64", events.0, events.1).await;
        let ours = Duplicates { store: ours, keys: FEW };
        let baseline = Duplicates { store: baseline, keys: FEW };
        compare(&run, &bed, "sqlite_duplicate_64", ours, baseline).await;
    });
}

/// A pool for the file of each side.
struct Files([SqlitePool; 2]);

impl Bed for Files {
    async fn reset(&self, side: usize) {
        let pool = &self.0[side];
        sqlx::query("DELETE FROM webhook_deliveries").execute(pool).await.expect("a table");
        let fill = sqlx::query(FILL).bind(NAMESPACE).bind(i64::try_from(FEW).expect("a number"));
        fill.execute(pool).await.expect("rows");
    }

    /// SQLite runs in this process.
    async fn cpu(&self) -> Option<Duration> {
        None
    }
}

/// Returns a pool of one connection to a file with a table of the adapter's layout.
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

/// The baseline.
#[derive(Clone)]
struct OneByOne(SqlitePool);

impl OneByOne {
    /// Runs a statement for one key, and returns how many rows it has changed.
    async fn run(&self, sql: &'static str, key: &DedupKey, token: Token) -> u64 {
        let query = sqlx::query(sql).bind(key.namespace()).bind(key.id());
        let query = query.bind(token.as_bytes().to_vec());
        query.execute(&self.0).await.expect("a statement").rows_affected()
    }
}

impl Store for OneByOne {
    async fn claim(&self, key: &DedupKey, token: Token) {
        assert_eq!(self.run(INSERT, key, token).await, 1);
    }

    async fn complete(&self, key: &DedupKey, token: Token) {
        assert_eq!(self.run(COMPLETE, key, token).await, 1);
    }

    async fn duplicate(&self, key: &DedupKey) {
        assert_eq!(self.run(INSERT, key, Token::random()).await, 0);
    }
}
