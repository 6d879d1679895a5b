//! SQLite files that refuse writes, are locked, are full, or are gone.

use std::error::Error as _;
use std::time::{Duration, Instant};

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{AssertSqlSafe, Connection, SqliteConnection, SqlitePool};
use tower::Layer;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{SqliteAdapter, SqliteOptions};
use tower_dedup::internals::sqlite_statements;
use tower_dedup::{ConfigError, DedupLayer, StoreErrorKind};

use support::effects::until_acknowledged;
use support::{
    FIRST, Handler, answered, by_header, dedup_key, on_claim, request, result, rows, send,
    spawn_send, sqlite_url, state, terms,
};

/// A SQLite file in a folder of its own.
pub(super) struct File {
    pub(super) dir: tempfile::TempDir,
}

impl File {
    pub(super) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(super) fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("dedup.db")
    }

    pub(super) fn url(&self) -> String {
        sqlite_url(self.dir.path())
    }

    pub(super) async fn connect(&self) -> SqliteAdapter {
        SqliteAdapter::connect(&self.url()).await.unwrap()
    }

    pub(super) async fn connection(&self) -> SqliteConnection {
        SqliteConnection::connect(&self.url()).await.unwrap()
    }
}

pub(super) async fn run(connection: &mut SqliteConnection, sql: &str) {
    sqlx::query(AssertSqlSafe(sql)).execute(connection).await.unwrap();
}

/// Another process holds the file. Known duplicates get 200, and new events get 503. A handler that
/// succeeds is answered with its response. Calls succeed again when the file is free.
#[tokio::test]
async fn file_held_by_another_process_delays_no_duplicate() {
    let (file, handler) = (File::new(), Handler::default());
    let layer = DedupLayer::new(by_header(), file.connect().await)
        .store_timeout(Duration::from_millis(500));
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    send(&service, request("known")).await;
    handler.hold();
    let running = spawn_send(&service, request("running"));
    handler.running(1).await;

    let mut other = file.connection().await;
    run(&mut other, "BEGIN EXCLUSIVE").await;
    let started = Instant::now();
    assert_eq!(result(&send(&service, request("known")).await), Some("duplicate"));
    // A duplicate that waited for the file would get 503 at `store_timeout`.
    let refused = send(&service, request("new")).await;
    assert_eq!(answered(&refused), (503, Some("unavailable")));
    assert!(started.elapsed() < Duration::from_secs(3));
    handler.release();
    assert_eq!(running.await.unwrap(), 200, "a success stays a success");
    assert_eq!(result(&send(&service, request("running")).await), Some("duplicate"));

    run(&mut other, "ROLLBACK").await;
    until_acknowledged(&service, "new").await;
    tokio::time::timeout(Duration::from_secs(30), handle.drain()).await.expect("drained");
    assert_eq!(state(&file.connect().await, "running").await, Some(KeyState::Complete));
    assert_eq!(handler.runs(), 3);
}

/// A full disk. New events get 503. A handler that runs is answered with its response. Calls
/// succeed again when there is space.
#[tokio::test]
async fn full_file_recovers_when_there_is_room() {
    let (file, handler) = (File::new(), Handler::default());
    let options = SqliteConnectOptions::new()
        .filename(file.path())
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(Duration::from_secs(1));
    let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
    let adapter = SqliteAdapter::new(pool.clone());
    let layer = DedupLayer::new(by_header(), adapter.clone());
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    send(&service, request("known")).await;
    handler.hold();
    let running = spawn_send(&service, request("running"));
    handler.running(1).await;

    // No page may be added, and the existing pages have no room.
    let pages: i64 = sqlx::query_scalar("PRAGMA page_count").fetch_one(&pool).await.unwrap();
    let limit = AssertSqlSafe(format!("PRAGMA max_page_count = {pages}"));
    sqlx::query(limit).execute(&pool).await.unwrap();
    let filler = "x".repeat(200);
    let full = async {
        for n in 0..10_000 {
            let key = dedup_key(&format!("{filler}{n}"));
            if adapter.claim(&key, &on_claim(&terms())).await.is_err() {
                return;
            }
        }
        panic!("the file does not fill");
    };
    full.await;
    let refused = send(&service, request(&filler)).await;
    assert_eq!(answered(&refused), (503, Some("unavailable")));
    assert_eq!(result(&send(&service, request("known")).await), Some("duplicate"));
    handler.release();
    assert_eq!(running.await.unwrap(), 200);
    assert_eq!(result(&send(&service, request("running")).await), Some("duplicate"));

    sqlx::query("PRAGMA max_page_count = 1000000").execute(&pool).await.unwrap();
    until_acknowledged(&service, &filler).await;
    tokio::time::timeout(Duration::from_secs(30), handle.drain()).await.expect("drained");
    assert_eq!(state(&adapter, "running").await, Some(KeyState::Complete));
}

/// A migration that failed is tried again.
#[tokio::test]
async fn migration_that_failed_is_tried_again() {
    let file = File::new();
    let adapter = file.connect().await;
    let mut other = file.connection().await;
    run(&mut other, "BEGIN EXCLUSIVE").await;
    let key = dedup_key("a");
    assert_eq!(
        adapter.claim(&key, &on_claim(&terms())).await.unwrap_err().kind(),
        StoreErrorKind::Refused
    );
    assert_eq!(adapter.migrate().await.unwrap_err().kind(), StoreErrorKind::Refused);
    run(&mut other, "ROLLBACK").await;
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
}

/// Many tasks and many processes migrate one file at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_tasks_migrate_at_once() {
    for _ in 0..10 {
        let file = File::new();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let url = file.url();
            tasks.spawn(async move {
                let adapter = SqliteAdapter::connect(&url).await.unwrap();
                adapter.claim(&dedup_key("a"), &on_claim(&terms())).await.unwrap()
            });
        }
        let answers = tasks.join_all().await;
        let firsts = answers.iter().filter(|answer| **answer == FIRST).count();
        assert_eq!(firsts, 1, "{answers:?}");
    }
}

/// The user's own tables, and the schema of `sqlx::migrate!`, are not touched.
#[tokio::test]
async fn migration_leaves_the_tables_of_the_user_alone() {
    let file = File::new();
    let options = SqliteConnectOptions::new().filename(file.path()).create_if_missing(true);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    sqlx::query("PRAGMA user_version = 7").execute(&pool).await.unwrap();
    sqlx::query("CREATE TABLE orders (id INTEGER)").execute(&pool).await.unwrap();
    let adapter = SqliteAdapter::with_options(pool.clone(), SqliteOptions::new().table("seen"));
    adapter.migrate().await.unwrap();
    adapter.claim(&dedup_key("a"), &on_claim(&terms())).await.unwrap();
    let mut tables: Vec<String> =
        sqlx::query_scalar("SELECT name FROM sqlite_schema WHERE type = 'table'")
            .fetch_all(&pool)
            .await
            .unwrap();
    tables.sort();
    assert_eq!(tables, ["orders", "seen", "seen_schema"]);
    let version: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(&pool).await.unwrap();
    assert_eq!(version, 7);
}

/// A table may have any name that SQL allows, and the user closes the user's pool.
#[tokio::test]
async fn table_name_may_be_a_word_of_sql() {
    let file = File::new();
    let options = SqliteConnectOptions::new().filename(file.path()).create_if_missing(true);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    let adapter = SqliteAdapter::with_options(pool.clone(), SqliteOptions::new().table("order"));
    let key = dedup_key("a");
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    assert_eq!(adapter.purge(1).await.unwrap() + rows(&adapter).await, 1);
    adapter.close().await;
    let _: i64 = sqlx::query_scalar("SELECT 1").fetch_one(&pool).await.unwrap();
    for name in ["", "1a", "a b", "a\"b", "sqlite_x", "SQLite_x", &"a".repeat(49)] {
        let options = || SqliteOptions::new().table(name);
        let adapter = SqliteAdapter::with_options(pool.clone(), options());
        for refused in [
            SqliteAdapter::connect_with(&file.url(), options()).await.map(drop).unwrap_err(),
            adapter.claim(&key, &terms()).await.map(drop).unwrap_err(),
            adapter.migrate().await.unwrap_err(),
        ] {
            assert_eq!(refused.kind(), StoreErrorKind::Config, "{name}");
            let cause = refused.source().unwrap().to_string();
            assert!(cause.starts_with("`table` must be"), "{cause}");
        }
    }
}

/// Two tables are two stores, and the user can create the schema.
#[tokio::test]
async fn schema_created_by_hand_works() {
    let file = File::new();
    let options = SqliteOptions::new().table("Events_2");
    let adapter = SqliteAdapter::connect_with(&file.url(), options).await.unwrap();
    let mut connection = file.connection().await;
    for statement in adapter.schema_sql() {
        sqlx::query(AssertSqlSafe(statement)).execute(&mut connection).await.unwrap();
    }
    let key = dedup_key("a");
    assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    let other = file.connect().await;
    assert_eq!(other.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
}

#[tokio::test]
async fn urls_that_name_no_file_are_refused() {
    for url in ["sqlite::memory:", "sqlite://", "sqlite://?mode=memory", "postgres://x", "x"] {
        let refused = SqliteAdapter::connect(url).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Config, "{url}");
    }
    // A URL without a scheme has its password in place of it.
    for (url, expected) in [
        ("mysql://user:secret@host/", "no adapter for the scheme `mysql:`"),
        ("secret@host:5432/app", "the store URL cannot be parsed"),
    ] {
        let Err(refused) = tower_dedup::adapter::connect(url).await else { panic!("connected") };
        let shown = format!("{refused} {refused:?}");
        assert!(!shown.contains("secret"), "{shown}");
        let cause = std::error::Error::source(&refused).unwrap().downcast_ref::<ConfigError>();
        assert_eq!(cause.unwrap().to_string(), expected);
    }
    let missing = SqliteAdapter::connect("sqlite:///nonexistent/folder/x.db").await.unwrap_err();
    assert_eq!(missing.kind(), StoreErrorKind::Unavailable);
}

/// Every key is searched by the primary key, also in a table that is known to be tiny: it grows.
#[tokio::test]
async fn plans_of_lookups_are_index_searches() {
    let file = File::new();
    let adapter = file.connect().await;
    adapter.migrate().await.unwrap();
    let mut connection = file.connection().await;
    assert_plans(&adapter, &mut connection).await;
    let rows = "INSERT INTO webhook_deliveries \
        (namespace, id, attempts, takeover, first_seen_at, expires_at) \
        VALUES ('a', 'b', 1, 0, 1, 1), ('a', 'c', 1, 0, 1, 1)";
    for sql in [rows, "ANALYZE"] {
        sqlx::query(sql).execute(&mut connection).await.unwrap();
    }
    assert_plans(&adapter, &mut connection).await;
}

/// Returns the steps of a statement's plan.
async fn plan(
    adapter: &SqliteAdapter,
    connection: &mut SqliteConnection,
    name: &str,
) -> Vec<String> {
    let statements = sqlite_statements(adapter);
    let (_, sql) = statements.iter().find(|(named, _)| *named == name).unwrap();
    let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
    let steps: Vec<(i64, i64, i64, String)> =
        sqlx::query_as(explain).fetch_all(connection).await.unwrap();
    steps.into_iter().map(|step| step.3).collect()
}

async fn assert_plans(adapter: &SqliteAdapter, connection: &mut SqliteConnection) {
    let by_range = "PRIMARY KEY ((namespace,id)>(?,?) AND (namespace,id)<(?,?))";
    let by_key = "PRIMARY KEY (namespace=? AND id=?)";
    for (name, searches) in [
        ("list", &[by_range][..]),
        ("stats", &["_expires_at (expires_at<?)", "_expires_at (expires_at>?)"]),
        ("purge", &["_expires_at (expires_at<?)", by_key]),
    ] {
        let plan = plan(adapter, connection, name).await;
        for search in searches {
            assert!(plan.iter().any(|step| step.contains(search)), "{name}\n{plan:?}");
        }
        // A list sorts its portion once more.
        let reads_all = |step: &String| {
            step.contains("TEMP B-TREE") && name != "list" || step == "SCAN webhook_deliveries"
        };
        assert!(!plan.iter().any(reads_all), "{name}\n{plan:?}");
    }
    for (name, searches) in [
        ("read", 1),
        ("get", 1),
        ("get_many", 1),
        ("complete_held", 1),
        ("release", 1),
        ("completion", 1),
        ("completion_check", 1),
        ("forget", 1),
        // They insert.
        ("claim_insert", 0),
        ("claim_upsert", 0),
        ("claim_complete_insert", 0),
        ("claim_complete_upsert", 0),
        ("renew", 0),
        ("complete", 0),
    ] {
        let plan = plan(adapter, connection, name).await;
        let found = plan.iter().filter(|step| step.contains(by_key)).count();
        assert_eq!(found, searches, "{name}\n{plan:?}");
        // The events of a completion are a list of JSON.
        let scans_rows = |step: &String| {
            (step.starts_with("SCAN t") || step.starts_with("SCAN e"))
                && !step.contains("VIRTUAL TABLE")
        };
        assert!(!plan.iter().any(scans_rows), "{name}\n{plan:?}");
    }
}

#[tokio::test]
async fn connect_reads_the_table_from_the_url() {
    let file = File::new();
    let url = format!("{}?dedup_table=seen", file.url());
    let adapter = SqliteAdapter::connect(&url).await.unwrap();
    adapter.claim(&dedup_key("a"), &terms()).await.unwrap();
    let rows = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM seen");
    assert_eq!(rows.fetch_one(&mut file.connection().await).await.unwrap(), 1);
    let refused = SqliteAdapter::connect("sqlite://a.db?dedup_table=a%3Bb").await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Config);
}
