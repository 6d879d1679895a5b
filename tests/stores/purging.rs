//! The SQL adapters purge by themselves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics_util::debugging::DebuggingRecorder;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection, SqliteConnection};
use sqlx::{PgPool, SqlitePool};
use tokio::runtime::{Handle, Runtime};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::{CallTerms, Token};
use tower_dedup::adapter::maintenance::{MaintenanceAdapter, PURGE_GRACE};
use tower_dedup::adapter::{
    PostgresAdapter, PostgresOptions, Purging, SqliteAdapter, SqliteOptions,
};

use super::observed::{measured, value};
use support::log::Log;
use support::postgres::Schema;
use support::time_travel::{milliseconds, shift_file, shift_schema};
use support::{claim_all, dedup_key, sorted_keys, terms, until};

const OFTEN: Duration = Duration::from_millis(5);
/// Time for many purges.
const WHILE: Duration = Duration::from_millis(300);

fn often() -> Purging {
    Purging::new().every(OFTEN)
}

/// A table without an adapter of its own.
enum Place {
    File(tempfile::TempDir),
    Schema(Schema),
}

impl Place {
    fn all() -> [Self; 2] {
        [Self::File(tempfile::tempdir().unwrap()), Self::Schema(Schema::fresh())]
    }

    fn path(dir: &tempfile::TempDir) -> PathBuf {
        dir.path().join("dedup.db")
    }

    async fn adapter(&self, purging: Purging) -> Arc<dyn MaintenanceAdapter> {
        match self {
            Self::File(dir) => {
                let url = format!("sqlite://{}", Self::path(dir).display());
                let options = SqliteOptions::new().purging(purging);
                Arc::new(SqliteAdapter::connect_with(&url, options).await.unwrap())
            }
            Self::Schema(schema) => {
                let options = PostgresOptions::new().purging(purging);
                Arc::new(PostgresAdapter::connect_with(&schema.url(), options).await.unwrap())
            }
        }
    }

    /// Adds keys that expired long enough ago, and one live key.
    async fn fill(&self, expired: usize) {
        let adapter = self.adapter(Purging::off()).await;
        let brief = |retention| CallTerms::on_claim(Token::random(), retention);
        if expired > 0 {
            let keys = sorted_keys(&format!("{:x}", rand::random::<u32>()), expired);
            claim_all(&*adapter, &keys, &brief(PURGE_GRACE)).await.unwrap();
        }
        adapter.claim(&dedup_key("live"), &brief(1_000 * PURGE_GRACE)).await.unwrap();
        adapter.close().await;
        let ago = -milliseconds(3 * PURGE_GRACE);
        match self {
            Self::File(dir) => shift_file(&mut Self::file(dir).await, ago).await,
            Self::Schema(schema) => {
                let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
                shift_schema(&mut connection, ago).await;
            }
        }
    }

    async fn file(dir: &tempfile::TempDir) -> SqliteConnection {
        let options = SqliteConnectOptions::new().filename(Self::path(dir));
        options.busy_timeout(Duration::from_secs(5)).connect().await.unwrap()
    }

    /// Counts the rows without any adapter. The row of a forgotten key, which has no attempts, may stay for an hour.
    async fn rows(&self) -> i64 {
        let count = "SELECT count(*) FROM webhook_deliveries WHERE attempts > 0";
        match self {
            Self::File(dir) => {
                sqlx::query_scalar(count).fetch_one(&mut Self::file(dir).await).await.unwrap()
            }
            Self::Schema(schema) => {
                let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
                sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap()
            }
        }
    }

    /// Waits until only the live key is there.
    async fn is_purged(&self) {
        let purged = async {
            while self.rows().await > 1 {
                tokio::time::sleep(OFTEN).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), purged).await.expect("expired keys vanish");
        assert_eq!(self.rows().await, 1);
    }

    /// Asserts that nothing purges.
    async fn stays(&self) {
        let rows = self.rows().await;
        assert!(rows > 1);
        tokio::time::sleep(WHILE).await;
        assert_eq!(self.rows().await, rows);
    }
}

#[test]
fn adapters_purge_by_default() {
    let default = format!("{:?}", Purging::new());
    assert!(format!("{:?}", PostgresOptions::new()).contains(&default));
    assert!(format!("{:?}", SqliteOptions::new()).contains(&default));
    assert_eq!(Purging::new(), Purging::new().every(Duration::from_secs(600)));
}

#[tokio::test]
async fn invalid_purging_is_the_error_of_every_call() {
    let place = Place::Schema(Schema::fresh());
    let Place::Schema(schema) = &place else { unreachable!() };
    let pool = PgPool::connect(&schema.url()).await.unwrap();
    let (least, most) = (Duration::from_millis(1), Duration::from_secs(365 * 86_400));
    for (every, keys, is_valid) in [
        (least, 1, true),
        (most, u32::MAX, true),
        (least / 2, 1, false),
        (most + least, 1, false),
        (least, 0, false),
    ] {
        let purging = Purging::new().every(every).keys_per_statement(keys);
        let options = PostgresOptions::new().purging(purging);
        let called = PostgresAdapter::with_options(pool.clone(), options).stats().await;
        let kind = called.map_err(|error| error.kind()).err();
        assert_eq!(kind, (!is_valid).then_some(StoreErrorKind::Config), "{every:?} {keys}");
    }
}

#[tokio::test]
async fn adapter_without_a_call_and_adapter_with_purging_off_delete_nothing() {
    for place in Place::all() {
        place.fill(5).await;
        let _unused = place.adapter(often()).await;
        let off = place.adapter(Purging::off()).await;
        off.stats().await.unwrap();
        place.stays().await;
        off.close().await;
    }
}

/// The task refers to the adapter weakly.
#[tokio::test]
async fn dropped_or_closed_adapter_purges_no_more() {
    let tasks = || Handle::current().metrics().num_alive_tasks();
    for place in Place::all() {
        for closes in [false, true] {
            let adapter = place.adapter(often()).await;
            adapter.stats().await.unwrap();
            assert!(tasks() > 0);
            let kept = closes.then(|| Arc::clone(&adapter));
            if closes {
                adapter.close().await;
            }
            drop(adapter);
            until(|| tasks() == 0).await;
            drop(kept);
        }
    }
}

/// As `#[sqlx::test]` does, while somebody holds the adapter.
#[tokio::test]
async fn closing_the_pool_ends_the_task_and_does_not_wait_for_it() {
    let (log, _guard) = Log::of_this_thread();
    let schema = Schema::fresh();
    let pool = PgPool::connect(&schema.url()).await.unwrap();
    let options = PostgresOptions::new().purging(Purging::new().every(Duration::from_millis(1)));
    let adapter = PostgresAdapter::with_options(pool.clone(), options);
    adapter.stats().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = SqliteConnectOptions::new().filename(Place::path(&dir)).create_if_missing(true);
    let file = SqlitePool::connect_with(file).await.unwrap();
    let options = SqliteOptions::new().purging(Purging::new().every(Duration::from_millis(1)));
    let sqlite = SqliteAdapter::with_options(file.clone(), options);
    sqlite.stats().await.unwrap();
    tokio::time::sleep(WHILE).await;
    let closing = Instant::now();
    pool.close().await;
    file.close().await;
    assert!(closing.elapsed() < Duration::from_secs(2), "{:?}", closing.elapsed());
    until(|| Handle::current().metrics().num_alive_tasks() == 0).await;
    let records = log.beginning("purging");
    assert!(records.is_empty(), "{records:?}");
    drop((adapter, sqlite));
}

/// While a handler holds the file, the purge does not fail silently.
#[tokio::test]
async fn sqlite_purge_beside_a_handler_warns_and_recovers() {
    let (log, _guard) = Log::of_this_thread();
    let place = Place::File(tempfile::tempdir().unwrap());
    place.fill(5).await;
    let Place::File(dir) = &place else { unreachable!() };
    let url = format!("sqlite://{}", Place::path(dir).display());
    let handler = SqlitePool::connect(&url).await.unwrap();
    let first = handler.begin_with("BEGIN IMMEDIATE").await.unwrap();

    let options = SqliteOptions::new().purging(often());
    let options = options.write_lock_timeout(Duration::from_secs(1));
    let adapter = SqliteAdapter::connect_with(&url, options).await.unwrap();
    assert!(adapter.get(&dedup_key("live")).await.unwrap().is_some());
    until(|| log.beginning("purging failed").len() > 1).await;
    place.stays().await;
    first.rollback().await.unwrap();
    place.is_purged().await;
    let failed = log.beginning("purging failed").into_iter();
    let warnings: Vec<_> = failed.filter(|event| event["level"] == "WARN").collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0]["error"].contains("is locked"), "{warnings:?}");
}

#[test]
fn call_on_another_runtime_starts_the_task_again_after_its_runtime_has_ended() {
    let runtime = || Runtime::new().unwrap();
    for place in Place::all() {
        let first = runtime();
        let adapter = first.block_on(async {
            let adapter = place.adapter(often()).await;
            place.fill(3).await;
            adapter.stats().await.unwrap();
            place.is_purged().await;
            adapter
        });
        // A second runtime starts no second task, and the end of the first ends the task.
        let second = runtime();
        second.block_on(async { adapter.stats().await.unwrap() });
        drop(first);
        second.block_on(async {
            place.fill(3).await;
            place.stays().await;
            adapter.stats().await.unwrap();
            place.is_purged().await;
            adapter.close().await;
        });
    }
}

#[tokio::test]
async fn record_in_starts_the_task() {
    let hour = Duration::from_secs(3_600);
    let [file, schema] = Place::all();
    file.fill(3).await;
    schema.fill(3).await;
    let (Place::File(dir), Place::Schema(of)) = (&file, &schema) else { unreachable!() };
    let key = dedup_key("evt_1");

    let options = SqliteConnectOptions::new().filename(Place::path(dir));
    let pool = SqlitePool::connect_with(options).await.unwrap();
    let options = SqliteOptions::new().purging(often());
    let adapter = SqliteAdapter::with_options(pool.clone(), options);
    let mut connection = pool.acquire().await.unwrap();
    adapter.record_in(&mut connection, &key, hour).await.unwrap();
    sqlx::query("DELETE FROM webhook_deliveries WHERE id = 'evt_1'")
        .execute(&mut *connection)
        .await
        .unwrap();
    file.is_purged().await;

    let pool = PgPool::connect(&of.url()).await.unwrap();
    let options = PostgresOptions::new().purging(often());
    let adapter = PostgresAdapter::with_options(pool.clone(), options);
    let mut transaction = pool.begin().await.unwrap();
    adapter.record_in(&mut transaction, &key, hour).await.unwrap();
    transaction.rollback().await.unwrap();
    schema.is_purged().await;
}

const LAST_PURGE: &str = "tower_dedup_last_purge_timestamp_seconds";

#[tokio::test]
async fn a_round_reports_the_keys() {
    for place in Place::all() {
        place.fill(3).await;
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        let _recorder = metrics::set_default_local_recorder(&recorder);
        let adapter = place.adapter(often()).await;
        let mine = CallTerms::on_completion(Token::random(), PURGE_GRACE, Duration::from_millis(1));
        adapter.claim(&dedup_key("lapsed"), &mine).await.unwrap();
        adapter.claim(&dedup_key("in flight"), &terms()).await.unwrap();
        let brief = CallTerms::on_claim(Token::random(), Duration::ZERO);
        adapter.claim(&dedup_key("expired"), &brief).await.unwrap();
        until(|| {
            let sums = measured(&snapshotter);
            let states = ["in_flight", "lapsed", "released", "complete", "expired"];
            states.map(|state| value(&sums, "tower_dedup_rows", &[state]))
                == [1.0, 1.0, 0.0, 1.0, 1.0]
                && value(&sums, "tower_dedup_oldest_lapsed_seconds", &[]) > 0.0
                && value(&sums, "tower_dedup_table_bytes", &[]) > 4_096.0
                && value(&sums, LAST_PURGE, &[]) > 1.7e9
        })
        .await;
        adapter.close().await;
    }
}

/// Otherwise the task would purge again and again while a test waits for something else.
#[tokio::test]
async fn nothing_is_purged_while_the_clock_of_tokio_is_paused() {
    let file = Place::File(tempfile::tempdir().unwrap());
    let adapter = file.adapter(often()).await;
    file.fill(3).await;
    let before = Handle::current().metrics().num_alive_tasks();
    adapter.stats().await.unwrap();
    file.is_purged().await;
    assert!(Handle::current().metrics().num_alive_tasks() > before);
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    // A connection may still be on its way back to its pool.
    until(|| Handle::current().metrics().num_alive_tasks() == before).await;
}
