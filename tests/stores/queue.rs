//! Calls that share a batch: the outcome of one call and a caller that goes do not affect the others.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, select};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgPool, SqliteConnection};
use tempfile::TempDir;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{PostgresAdapter, SqliteAdapter, SqliteOptions};
use tower_dedup::internals::with_sqlite_bounds;
use tower_dedup::{StoreError, StoreErrorKind};

use support::postgres::Schema;
use support::{FIRST, claim_all, dedup_key, on_claim, polled, sorted_keys, sqlite_url, terms};

fn pool(schema: &Schema) -> PgPool {
    PgPoolOptions::new().max_connections(4).connect_lazy(&schema.url()).unwrap()
}

async fn postgres(schema: &Schema) -> PostgresAdapter {
    let adapter = PostgresAdapter::connect(&schema.url()).await.unwrap();
    adapter.migrate().await.unwrap();
    adapter
}

pub(super) async fn sqlite(dir: &TempDir) -> SqliteAdapter {
    sqlite_with(dir, SqliteOptions::new()).await
}

async fn sqlite_with(dir: &TempDir, options: SqliteOptions) -> SqliteAdapter {
    let adapter = SqliteAdapter::connect_with(&sqlite_url(dir.path()), options).await.unwrap();
    adapter.migrate().await.unwrap();
    adapter
}

/// Room for eight rows that wait.
fn few_on_sqlite() -> SqliteOptions {
    with_sqlite_bounds(SqliteOptions::new(), 1_024, 8)
}

/// Runs all calls at once, each in a task.
async fn at_once<T, F>(calls: impl IntoIterator<Item = F>) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let tasks: Vec<_> = calls.into_iter().map(tokio::spawn).collect();
    let all = tokio::time::timeout(Duration::from_secs(60), join_all(tasks)).await;
    all.expect("every call gets a reply").into_iter().map(Result::unwrap).collect()
}

async fn claim<A: DedupAdapter>(
    adapter: A,
    id: String,
    mine: CallTerms,
) -> Result<ClaimReply, StoreError> {
    adapter.claim(&dedup_key(&id), &mine).await
}

/// If the database refuses a row, only that row's caller gets the error.
async fn poison<A: DedupAdapter + Clone>(adapter: A) {
    let id = |at| if at % 25 == 7 { format!("poison-{at}") } else { format!("good-{at}") };
    let call_terms: Vec<_> = (0..100).map(|_| terms()).collect();
    let claims = (0..100).map(|at| claim(adapter.clone(), id(at), call_terms[at].clone()));
    let claimed = at_once(claims.collect::<Vec<_>>()).await;
    for (at, claimed) in claimed.into_iter().enumerate() {
        match claimed {
            Ok(claimed) => {
                assert_eq!((claimed, at % 25 == 7), (ClaimReply::first(1, false), false));
            }
            Err(error) => assert!(at % 25 == 7, "{at}: {error:?}"),
        }
    }
    let completions = (0..100).map(|at| {
        let (adapter, key, mine) = (adapter.clone(), dedup_key(&id(at)), call_terms[at].clone());
        async move { adapter.complete(&key, &mine).await }
    });
    for (at, completed) in at_once(completions.collect::<Vec<_>>()).await.into_iter().enumerate() {
        assert_eq!(completed.is_err(), at % 25 == 7, "{at}: {completed:?}");
        assert!(completed.is_err() || completed.unwrap() == CompleteReply::Held);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_row_fails_only_its_caller_on_postgres() {
    let schema = Schema::fresh();
    let adapter = postgres(&schema).await;
    let check = "ALTER TABLE webhook_deliveries ADD CHECK (id NOT LIKE 'poison%')";
    sqlx::query(check).execute(&pool(&schema)).await.unwrap();
    poison(adapter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_row_fails_only_its_caller_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = sqlite(&dir).await;
    let mut connection = SqliteConnection::connect(&sqlite_url(dir.path())).await.unwrap();
    let trigger = "CREATE TRIGGER poison BEFORE INSERT ON webhook_deliveries \
                   WHEN NEW.id LIKE 'poison%' BEGIN SELECT RAISE(ABORT, 'poison'); END";
    sqlx::query(trigger).execute(&mut connection).await.unwrap();
    poison(adapter).await;
}

/// Above the limit of waiting rows, a call is refused and not sent. Dropped callers take no room from waiting callers.
#[tokio::test]
async fn waiting_rows_are_bounded_and_dropped_callers_take_no_room_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = sqlite_with(&dir, few_on_sqlite()).await;
    for round in 0..20 {
        for at in 0..8 {
            let gone = dedup_key(&format!("gone-{round}-{at}"));
            assert!(polled(adapter.claim(&gone, &terms()), 1, false).await.is_none());
        }
        let stay: Vec<_> = (0..8).map(|at| dedup_key(&format!("stays-{round}-{at}"))).collect();
        let (mine, late) = (terms(), dedup_key(&format!("late-{round}")));
        // One task makes all calls, so nothing is sent before the last one.
        let all = join_all(stay.iter().map(|key| adapter.claim(key, &mine)));
        let (claimed, refused) = join(all, adapter.claim(&late, &mine)).await;
        for claimed in claimed {
            assert_eq!(claimed.unwrap(), FIRST);
        }
        let refused = refused.unwrap_err();
        assert_eq!((refused.kind(), refused.is_transient()), (StoreErrorKind::Overloaded, true));
        assert_eq!(adapter.claim(&late, &terms()).await.unwrap(), FIRST);
        for at in 0..8 {
            let gone = dedup_key(&format!("gone-{round}-{at}"));
            assert_eq!(adapter.get(&gone).await.unwrap(), None, "a call without a caller was sent");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_duplicates_writes_no_page_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = sqlite(&dir).await;
    let (known, held) = (sorted_keys("known", 100), sorted_keys("held", 10));
    claim_all(&adapter, &known, &on_claim(&terms())).await.unwrap();
    claim_all(&adapter, &held, &terms()).await.unwrap();
    let mut other = SqliteConnection::connect(&sqlite_url(dir.path())).await.unwrap();
    let mut version = async || -> i64 {
        sqlx::query_scalar("PRAGMA data_version").fetch_one(&mut other).await.unwrap()
    };
    let wal = || std::fs::metadata(dir.path().join("dedup.db-wal")).unwrap().len();
    let before = (version().await, wal());
    // A duplicate does not wait for a writer either.
    let mut writer = SqliteConnection::connect(&sqlite_url(dir.path())).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.unwrap();
    for _ in 0..20 {
        for terms in [terms(), on_claim(&terms())] {
            let claimed = claim_all(&adapter, &known, &terms).await.unwrap();
            assert!(claimed.iter().all(|one| matches!(one, ClaimReply::Duplicate(_))));
            let claimed = claim_all(&adapter, &held, &terms).await.unwrap();
            assert!(claimed.iter().all(|one| *one == ClaimReply::InFlight));
        }
    }
    sqlx::query("ROLLBACK").execute(&mut writer).await.unwrap();
    assert_eq!((version().await, wal()), before);
    adapter.claim(&dedup_key("new"), &on_claim(&terms())).await.unwrap();
    assert_ne!(version().await, before.0, "a write changes the file");
}

/// A batch waits for a row that an open transaction has inserted. Calls that gather during the wait go in the
/// second worker. The batch waits as long as a statement may wait for a row, so a slow machine may
/// need several attempts.
#[tokio::test]
async fn callers_do_not_wait_for_the_batch_before_theirs() {
    let schema = Schema::fresh();
    let adapter = postgres(&schema).await;
    let held = dedup_key("held");
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy(&schema.url()).unwrap();
    let mut theirs = pool.begin().await.unwrap();
    let recorded = adapter.record_in(&mut theirs, &held, Duration::from_secs(60)).await;
    assert_eq!(recorded.unwrap(), ClaimReply::first(1, false));
    for round in 0..50 {
        let mine = terms();
        let keys: Vec<_> = (0..40).map(|at| dedup_key(&format!("{round}-{at}"))).collect();
        let waits = pin!(adapter.renew(&held, &mine));
        let many = join_all(keys.iter().map(|key| adapter.claim(key, &mine)));
        match select(waits, pin!(many)).await {
            Either::Right((claimed, waits)) => {
                let first = |claimed: &ClaimReply| *claimed == ClaimReply::first(1, false);
                assert!(claimed.iter().all(|claimed| claimed.as_ref().is_ok_and(first)));
                assert_eq!(waits.await.unwrap_err().kind(), StoreErrorKind::Refused);
                return;
            }
            Either::Left((waited, many)) => {
                assert_eq!(waited.unwrap_err().kind(), StoreErrorKind::Refused);
                many.await;
            }
        }
    }
    panic!("the callers waited every time");
}
