//! Servers and tables with other settings: another language, another encoding, partitions, errors
//! of a pooler.

use std::error::Error as _;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};

use support::effects::Database;
use support::postgres::{Schema, Server, fresh_name, shared, with_path};
use support::proxy::{through, to_postgres};
use support::{claim_all, dedup_key, rows, terms};

async fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(3).connect(url).await.unwrap()
}

/// Another session locks the row without an advisory lock: error 55P03, which has a text.
async fn lock_that_is_not_ours_is_in_flight(adapter: &PostgresAdapter, pool: &PgPool) {
    let (key, mine) = (dedup_key("held"), terms());
    adapter.claim(&key, &mine).await.unwrap();
    adapter.release(&key, &mine).await.unwrap();
    let mut theirs = pool.begin().await.unwrap();
    let lock = "SELECT FROM webhook_deliveries WHERE id = 'held' FOR UPDATE";
    assert_eq!(theirs.execute(lock).await.unwrap().rows_affected(), 1);
    let mut set = vec![key.clone(), dedup_key("in front"), dedup_key("z")];
    set.sort();
    for answer in set.iter().zip(claim_all(adapter, &set, &terms()).await.unwrap()) {
        assert_eq!(answer.1 == ClaimReply::InFlight, *answer.0 == key);
    }
    theirs.rollback().await.unwrap();
}

/// Errors have codes; their texts are in the language of the server.
#[tokio::test]
#[ignore = "it needs the locale de_DE: scripts/check runs it"]
async fn server_in_another_language_changes_no_reply() {
    let server = Server::start_in("de_DE");
    let pool = pool(&server.url()).await;
    let error = pool.execute("SELECT nonsense").await.unwrap_err().to_string();
    assert!(error.contains("existiert nicht"), "the server speaks German: {error}");
    let adapter = PostgresAdapter::with_options(pool.clone(), PostgresOptions::new());
    lock_that_is_not_ours_is_in_flight(&adapter, &pool).await;
    pool.execute("DROP TABLE webhook_deliveries, webhook_deliveries_schema").await.unwrap();
    assert_eq!(adapter.stats().await.unwrap_err().kind(), StoreErrorKind::Refused);
    adapter.migrate().await.unwrap();
    assert_eq!(rows(&adapter).await, 0);
}

const PAGE: &str = include_str!("../../src/docs/stores/postgres.md");

/// Returns the SQL of the guide that contains these words.
fn of_the_guide(words: &str) -> &'static str {
    let blocks = PAGE.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.into_iter().find(|block| block.contains(words)).expect("a block with these words")
}

#[tokio::test]
async fn sql_of_the_page_runs() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    for words in ["CONCURRENTLY", "autovacuum"] {
        database.run(of_the_guide(words)).await;
    }
}

#[tokio::test]
async fn database_without_all_characters_is_refused() {
    let mut admin = PgConnection::connect(shared()).await.unwrap();
    let name = fresh_name();
    for (encoding, works) in [("LATIN1", false), ("SQL_ASCII", true)] {
        let create =
            format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'");
        admin.execute(AssertSqlSafe(create)).await.unwrap();
        let pool = pool(&with_path(shared(), &name)).await;
        let adapter = PostgresAdapter::new(pool.clone());
        let claimed = adapter.claim(&dedup_key("ключ"), &terms()).await;
        match claimed {
            Ok(claimed) => assert_eq!((works, claimed), (true, ClaimReply::first(1, false))),
            Err(error) => assert_eq!((works, error.kind()), (false, StoreErrorKind::Config)),
        }
        adapter.close().await;
        pool.close().await;
        admin.execute(AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)"))).await.unwrap();
    }
}

/// A server or a pooler reports that the outcome of a statement is unknown, or has a code that is not one of the
/// server's refusals.
#[tokio::test]
async fn error_with_an_unknown_outcome_is_no_refusal() {
    let schema = Schema::fresh();
    let pool = pool(&schema.url()).await;
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    let unknown = [
        "40003", "58000", "58030", "0A000", "P0001", "XX000", "08P01", "2F000", "38000", "F0000",
        "HV000", "57000", "PX001",
    ];
    let refused = [
        "22023", "23505", "25001", "25006", "28000", "3D000", "3F000", "40001", "40P01", "42501",
        "53100", "54000", "55000", "57014",
    ];
    let unknown = unknown.map(|code| (code, StoreErrorKind::Unavailable));
    let refused = refused.map(|code| (code, StoreErrorKind::Refused));
    for (code, kind) in unknown.into_iter().chain(refused) {
        let raise = format!(
            "CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             RAISE EXCEPTION USING ERRCODE = '{code}'; END $$; \
             DROP TRIGGER IF EXISTS fail ON webhook_deliveries; \
             CREATE TRIGGER fail BEFORE INSERT ON webhook_deliveries \
             FOR EACH ROW EXECUTE FUNCTION fail()"
        );
        pool.execute(sqlx::raw_sql(AssertSqlSafe(raise))).await.unwrap();
        let error = adapter.claim(&dedup_key("a"), &terms()).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{code}");
    }
}

/// A server that is stopped reads otherwise than one that is slow.
#[tokio::test]
async fn call_names_the_reason_for_which_no_connection_opens() {
    let schema = Schema::fresh();
    let direct: PgConnectOptions = schema.url().parse().unwrap();
    let proxy = to_postgres(&direct).await;
    let options = through(proxy.port(), direct);
    let pool = PgPoolOptions::new().max_connections(3).connect_with(options).await.unwrap();
    let adapter = PostgresAdapter::new(pool);
    adapter.claim(&dedup_key("a"), &terms()).await.unwrap();
    proxy.close();
    // The reply to this call is lost with its connection.
    adapter.claim(&dedup_key("b"), &terms()).await.unwrap_err();
    // As a layer bounds it.
    let (bound, key) = (Duration::from_secs(2), dedup_key("c"));
    let error = tokio::time::timeout(bound, adapter.claim(&key, &terms())).await.unwrap();
    let error = error.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    let source = error.source().unwrap().to_string();
    assert!(source.contains("refused"), "{source}");
}
