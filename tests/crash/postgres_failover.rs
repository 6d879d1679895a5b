//! Failover: a primary goes away, and its standby takes its place behind the same address. No acknowledged write is
//! lost, because it has waited for the standby. The soak loses primaries under load.

use std::slice;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool};
use tower::Layer;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, Token};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::internals::with_postgres_bounds;

use support::cluster::{Cluster, blocking, scalar};
use support::effects::{Effects, complete_in, until_acknowledged, writes_and_waits};
use support::{FIRST, Handler, by_header, dedup_key, on_claim, request, result, send, spawn_send};

const HOUR: Duration = Duration::from_secs(3_600);
/// The writes end long before this bound.
const FOR_EVER: Duration = Duration::from_secs(40);
const LEASE: Duration = Duration::from_secs(3);

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), HOUR, HOUR)
}

/// Returns a pool whose sessions have this setting.
fn pool_of(url: &str, connections: u32, synchronous_commit: &str) -> PgPool {
    let options: PgConnectOptions = url.parse().unwrap();
    PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(2))
        .connect_lazy_with(options.options([("synchronous_commit", synchronous_commit)]))
}

/// Commits of the role do not wait for the standby. Acknowledged writes of the adapter do. (With
/// `remote_write`, a commit also waits for an absent standby.)
#[tokio::test(flavor = "multi_thread")]
async fn writes_of_a_role_that_does_not_wait_for_the_standby_wait_for_it() {
    let mut cluster = Cluster::start().await;
    let url = cluster.url();
    let mut complete = Vec::new();
    for setting in ["local", "off"] {
        let pool = pool_of(&url, 8, setting);
        let adapter = PostgresAdapter::new(pool.clone());
        let options = with_postgres_bounds(PostgresOptions::new().connections(8), 1, 16_384);
        let single = PostgresAdapter::with_options(pool.clone(), options);
        let key = |name: &str| dedup_key(&format!("{setting} {name}"));
        let (batched, one, undone, open, user) =
            (key("batched"), key("one"), key("undone"), key("open"), key("user"));
        let (claimed, recorded, mine) = (key("claimed"), key("recorded"), terms());
        adapter.claim(&batched, &mine).await.unwrap();
        single.claim(&one, &mine).await.unwrap();
        single.claim(&undone, &on_claim(&mine)).await.unwrap();
        single.claim(&open, &mine).await.unwrap();
        let mut transaction = pool.begin().await.unwrap();
        let first = single.record_in(&mut transaction, &user, HOUR).await.unwrap();
        assert_eq!(first, FIRST);

        let standby = Arc::clone(&cluster.standby);
        blocking(move || standby.stop_immediately()).await;
        let ended = Mutex::new(Vec::new());
        let end = |write: &'static str| ended.lock().unwrap().push(write);
        let writes = async {
            tokio::join!(
                async {
                    let complete = adapter.complete(&batched, &mine).await.unwrap();
                    assert_eq!(complete, CompleteReply::Held);
                    end("a completion in a batch");
                },
                async {
                    assert_eq!(single.complete(&one, &mine).await.unwrap(), CompleteReply::Held);
                    end("a completion");
                },
                async {
                    single.release(&undone, &on_claim(&mine)).await.unwrap();
                    end("an undone record");
                },
                async {
                    complete_in(&pool, &single, slice::from_ref(&open), &mine).await;
                    end("a completion in a handler's transaction");
                },
                async {
                    transaction.commit().await.unwrap();
                    end("a commit of the user's");
                },
                async {
                    assert_eq!(single.claim(&recorded, &on_claim(&mine)).await.unwrap(), FIRST);
                    end("a record");
                },
                async {
                    let first = single.claim(&claimed, &mine).await.unwrap();
                    assert_eq!(first, ClaimReply::first(1, false));
                    end("a claim");
                },
            )
        };
        let nothing_ends = async {
            let mut admin = PgConnection::connect(&cluster.primary.url()).await.unwrap();
            let wait = "SELECT count(*) >= 7 FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
            while !scalar::<bool>(&mut admin, wait).await {
                assert_eq!(*ended.lock().unwrap(), [""; 0], "{setting}: acknowledged too early");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let standby = Arc::clone(&cluster.standby);
            blocking(move || standby.start_again()).await;
        };
        let both = Box::pin(async { tokio::join!(writes, nothing_ends) });
        tokio::time::timeout(FOR_EVER, both).await.expect("an end");
        cluster.until_followed().await;
        complete.extend([batched, one, open, user, recorded]);
    }
    let primary = Arc::clone(&cluster.primary);
    blocking(move || primary.stop_immediately()).await;
    cluster.promote().await;
    let promoted = PostgresAdapter::connect(&cluster.primary.url()).await.unwrap();
    for key in complete {
        let again = promoted.claim(&key, &terms()).await.unwrap();
        assert!(matches!(again, ClaimReply::Duplicate(_)), "{key:?}: {again:?}");
    }
}

/// If a waiting COMMIT's session were terminated, the commit would become visible without the
/// standby, and a duplicate of it would be acknowledged. So the session stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_waits_for_the_standby_is_not_acknowledged_before_it() {
    let cluster = Cluster::start().await;
    let url = cluster.url();
    let effects = Effects::create(&url).await;
    let pool = pool_of(&url, 4, "on");
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    let layer = DedupLayer::transactional(by_header(), adapter).wait(Duration::ZERO);
    let held = Handler::default();
    held.hold();
    let layer = layer.lease(LEASE).store_timeout(Duration::from_millis(300));
    let service = layer.handler_timeout(2 * LEASE).layer(writes_and_waits(&pool, &held));
    let first = spawn_send(&service, request("event"));
    held.running(1).await;
    let standby = Arc::clone(&cluster.standby);
    blocking(move || standby.stop_immediately()).await;
    held.release();
    assert_eq!(first.await.unwrap(), 504);
    let mut admin = PgConnection::connect(&cluster.primary.url()).await.unwrap();
    let commits =
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query = 'COMMIT'";
    for _ in 0..10 {
        let response = send(&service, request("event")).await;
        assert_eq!(response.status(), 503, "{:?}", result(&response));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(scalar::<i64>(&mut admin, commits).await, 1);
        assert_eq!(effects.of("event").await, 0, "visible without the standby");
    }
    let standby = Arc::clone(&cluster.standby);
    blocking(move || standby.start_again()).await;
    until_acknowledged(&service, "event").await;
    assert_eq!(effects.of("event").await, 1);
    assert_eq!(result(&send(&service, request("event")).await), Some("duplicate"));
}
