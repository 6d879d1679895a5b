//! The Postgres adapter: its schema, its cost for the server, and servers that refuse.

use std::str::FromStr;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::maintenance::{ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::{DedupKey, StoreErrorKind};

use support::postgres::{Schema, Server};
use support::{FIRST, claim_all, complete_all, dedup_key, on_claim, rows, terms};

fn keys(ids: std::ops::Range<u32>) -> Vec<DedupKey> {
    let mut keys: Vec<_> = ids.map(|id| dedup_key(&id.to_string())).collect();
    keys.sort();
    keys
}

async fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(4).connect(url).await.unwrap()
}

#[tokio::test]
async fn only_migrate_makes_the_table_without_make_table() {
    let schema = Schema::fresh();
    let pool = pool(&schema.url()).await;
    let adapter =
        PostgresAdapter::with_options(pool.clone(), PostgresOptions::new().make_table(false));
    let key = dedup_key("a");
    for _ in 0..2 {
        for error in [
            adapter.claim(&key, &terms()).await.unwrap_err(),
            adapter.list(&ListFilter::default(), None, 1).await.map(drop).unwrap_err(),
            adapter.stats().await.map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), StoreErrorKind::Refused, "{error:?}");
        }
        adapter.migrate().await.unwrap();
        assert_eq!(rows(&adapter).await, 0);
        assert_eq!(adapter.claim(&key, &terms()).await.unwrap(), FIRST);
        let older = "UPDATE webhook_deliveries_schema SET version = 0";
        sqlx::query(older).execute(&pool).await.unwrap();
        let other =
            PostgresAdapter::with_options(pool.clone(), PostgresOptions::new().make_table(false));
        assert_eq!(other.stats().await.unwrap_err().kind(), StoreErrorKind::Refused);
        let drop = "DROP TABLE webhook_deliveries, webhook_deliveries_schema";
        sqlx::raw_sql(drop).execute(&pool).await.unwrap();
    }
}

/// A lone release waits nearly as long as a statement may run, by a setting of the server.
#[tokio::test]
async fn claim_is_released_however_long_a_statement_may_run() {
    let schema = Schema::fresh();
    let options = PostgresOptions::new().statement_timeout(Duration::from_secs(86_400));
    let adapter = PostgresAdapter::connect_with(&schema.url(), options).await.unwrap();
    let (key, terms) = (dedup_key("a"), on_claim(&terms()));
    assert_eq!(adapter.claim(&key, &terms).await.unwrap(), FIRST);
    adapter.release(&key, &terms).await.unwrap();
    assert_eq!(adapter.get(&key).await.unwrap(), None);
}

#[tokio::test]
async fn many_connections_create_the_schema_at_once() {
    let schema = Schema::alone();
    for round in 0..5 {
        let name = format!("new_{round}");
        let all = (0..8).map(|_| {
            let (name, database) = (name.clone(), schema.database_url().to_owned());
            tokio::spawn(async move {
                let options = PostgresOptions::new().schema(&name);
                let adapter = PostgresAdapter::connect_with(&database, options).await.unwrap();
                adapter.claim(&dedup_key("a"), &on_claim(&terms())).await.unwrap()
            })
        });
        let answers = join_all(all).await;
        let first = answers.iter().filter(|answer| *answer.as_ref().unwrap() == FIRST);
        assert_eq!(first.count(), 1);
    }
}

/// A migration that failed is tried again.
#[tokio::test]
async fn migration_that_failed_is_retried() {
    let schema = Schema::fresh();
    let role = format!("{}_role", schema.name());
    let mut admin = PgConnection::connect(schema.database_url()).await.unwrap();
    let run = async |admin: &mut PgConnection, sql: String| {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(admin).await.unwrap();
    };
    run(
        &mut admin,
        format!("CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {} TO {role}", schema.name()),
    )
    .await;
    let options = PgConnectOptions::from_str(&schema.url()).unwrap().username(&role).password("");
    let adapter = PostgresAdapter::new(PgPoolOptions::new().connect_lazy_with(options));
    for _ in 0..2 {
        let refused = adapter.claim(&dedup_key("a"), &on_claim(&terms())).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Refused, "{refused:?}");
    }
    run(&mut admin, format!("GRANT CREATE ON SCHEMA {} TO {role}", schema.name())).await;
    let recorded = adapter.claim(&dedup_key("a"), &on_claim(&terms())).await.unwrap();
    assert_eq!(recorded, FIRST);
    run(&mut admin, format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

/// The user's own migration tool creates the schema, under names that are words of SQL.
#[tokio::test]
async fn schema_created_by_the_user_works() {
    let schema = Schema::fresh();
    let options = PostgresOptions::new().table("order").schema(schema.name());
    let pool = pool(schema.database_url()).await;
    let adapter = PostgresAdapter::with_options(pool.clone(), options);
    for statement in adapter.schema_sql() {
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&pool).await.unwrap();
    }
    let claimed = claim_all(&adapter, &keys(0..3), &terms()).await.unwrap();
    assert_eq!(claimed, vec![FIRST; 3]);
    assert_eq!(rows(&adapter).await, 3);
    adapter.close().await;
    assert!(!pool.is_closed(), "the user's pool stays open");
}

#[tokio::test]
async fn connect_that_fails_reports_it_without_the_url() {
    for url in ["postgres:/nowhere", "mysql://host/db", "postgres://user:hidden@host:notaport/db"] {
        let error = PostgresAdapter::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config, "{url}");
        assert!(!format!("{error:?}").contains("hidden"));
    }
    let error = tower_dedup::adapter::connect("postgres://user:hidden@127.0.0.1:1/db").await;
    let error = error.map(drop).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(!format!("{error:?}").contains("hidden"), "{error:?}");
    for options in [PostgresOptions::new().table("a.b"), PostgresOptions::new().schema("a\"b")] {
        let pool = PgPoolOptions::new().connect_lazy("postgres://127.0.0.1:1/db").unwrap();
        let adapter = PostgresAdapter::with_options(pool, options);
        let calls =
            [adapter.claim(&dedup_key("a"), &terms()).await.map(drop), adapter.migrate().await];
        for error in calls.map(Result::unwrap_err) {
            assert_eq!(error.kind(), StoreErrorKind::Config, "{error:?}");
        }
    }
}

/// A duplicate writes nothing, so it never waits for a disk.
#[tokio::test]
async fn duplicates_write_no_wal() {
    // A server of its own, because the test reads its WAL.
    let server = Server::start();
    let adapter = PostgresAdapter::connect(&server.url()).await.unwrap();
    let (known, mine) = (keys(0..100), terms());
    claim_all(&adapter, &known, &mine).await.unwrap();
    complete_all(&adapter, &known, &mine).await.unwrap();
    let in_flight = keys(100..200);
    claim_all(&adapter, &in_flight, &terms()).await.unwrap();
    let pool = pool(&server.url()).await;
    // Vacuum and checkpoints write WAL, too.
    for sql in
        ["ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()", "VACUUM", "CHECKPOINT"]
    {
        sqlx::raw_sql(sql).execute(&pool).await.unwrap();
    }
    let position = async || -> i64 {
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::int8";
        sqlx::query_scalar(sql).fetch_one(&pool).await.unwrap()
    };
    // The first read may set hint bits, or clean a page.
    claim_all(&adapter, &known, &terms()).await.unwrap();
    let before = position().await;
    for round in 0..20 {
        let claimed = claim_all(&adapter, &known, &terms()).await.unwrap();
        assert!(claimed.iter().all(|one| matches!(one, ClaimReply::Duplicate(_))), "{round}");
        let claimed = claim_all(&adapter, &in_flight, &terms()).await.unwrap();
        assert_eq!(claimed, vec![ClaimReply::InFlight; 100]);
        claim_all(&adapter, &known, &on_claim(&terms())).await.unwrap();
    }
    let written = position().await - before;
    // 6,000 replies. The background of any server writes a WAL record now and then.
    assert!(written < 2_000, "{written} bytes of log");
}

/// After a failover, a service may be connected to a standby. A standby answers no call, not even
/// for keys that it knows.
#[tokio::test]
async fn standby_is_refused_until_it_is_promoted() {
    let primary = Server::start();
    let adapter = PostgresAdapter::connect(&primary.url()).await.unwrap();
    let (known, new, mine) = (dedup_key("known"), dedup_key("new"), terms());
    adapter.claim(&known, &on_claim(&mine)).await.unwrap();
    let standby = primary.standby();
    let other = PostgresAdapter::new(pool(&standby.url()).await);
    // Operators may read.
    assert!(other.get(&known).await.unwrap().is_some());
    for key in [&known, &new] {
        assert!(other.claim(key, &on_claim(&terms())).await.unwrap_err().is_transient());
        assert!(other.claim(key, &terms()).await.unwrap_err().is_transient());
        assert!(other.complete(key, &terms()).await.unwrap_err().is_transient());
    }
    primary.stop_immediately();
    standby.promote();
    // The same pool, without a restart.
    let again = other.claim(&known, &on_claim(&terms())).await.unwrap();
    assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
    assert_eq!(other.claim(&new, &terms()).await.unwrap(), ClaimReply::first(1, false));
}
