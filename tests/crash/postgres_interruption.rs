//! Interrupted deliveries on Postgres: futures are dropped, runtimes end, sessions are terminated,
//! connections break. Afterwards no connection is inside a transaction. Each complete key has one
//! effect. The next delivery of the event succeeds.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use sqlx::postgres::PgPoolOptions;
use tokio::sync::Semaphore;
use tower::{Layer, Service, ServiceExt};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{ForgetReply, MaintenanceAdapter};
use tower_dedup::ledger::Ledger;
use tower_dedup::{DedupKey, DedupLayer, StoreErrorKind};

use support::effects::{
    Database, MINUTE, answer, apart, commit_effect, transactional, until_acknowledged, write,
};
use support::proxy::{Cut, Proxy, through, to_postgres};
use support::{Body, FIRST, answered, by_header, dedup_key, polled, request, send};

#[tokio::test]
async fn request_dropped_at_any_poll_leaves_nothing_behind() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let service = transactional(&pool).layer(write(&pool));
    for polls in 0..5 {
        for again in [false, true] {
            let id = format!("{polls}-{again}");
            polled(service.clone().oneshot(request(&id)), polls, again).await;
            until_acknowledged(&service, &id).await;
            assert_eq!(database.effects_and_key(&id).await, 1, "{id}");
            database.until_no_transaction_is_open().await;
        }
    }
}

/// The handler's transaction is dropped at each of its awaits: in BEGIN, in the effect, in the completion, in COMMIT.
#[tokio::test]
async fn transaction_dropped_at_any_await_leaves_nothing_behind() {
    let database = Database::fresh().await;
    // The proxy delays each reply, so that every await is really pending.
    let (_proxy, pool) = database.proxied(3).await;
    let service = transactional(&pool).layer(write(&pool));
    until_acknowledged(&service, "the schema is there").await;
    let mut cut = 0;
    for (polls, again) in (1..16).flat_map(|polls| [(polls, false), (polls, true)]) {
        let (id, theirs) = (format!("{polls}-{again}"), pool.clone());
        let hasty = tower::service_fn(move |request: Request<Body>| {
            let pool = theirs.clone();
            async move {
                let event = request.extensions().get().unwrap();
                let committed = polled(commit_effect(&pool, event, async {}), polls, again).await;
                Ok::<_, Infallible>(answer(committed.is_some_and(|it| it.is_ok())))
            }
        });
        let hasty = transactional(&pool).layer(hasty);
        cut += usize::from(send(&hasty, request(&id)).await.status() != 200);
        until_acknowledged(&service, &id).await;
        assert_eq!(database.effects_and_key(&id).await, 1, "{id}");
        database.until_no_transaction_is_open().await;
    }
    assert!(cut > 5, "{cut} transactions were cut off");
}

/// The timeout expires during any call.
#[tokio::test]
async fn store_timeout_at_any_moment_leaves_nothing_behind() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let patient = transactional(&pool).wait(Duration::ZERO).layer(write(&pool));
    send(&patient, request("the schema is there")).await;
    for micros in (1..10_000).step_by(250) {
        // A lost claim is released in as little time as this, or lapses.
        let hasty = transactional(&pool).lease(Duration::from_millis(100));
        let hasty = hasty.store_timeout(Duration::from_micros(micros));
        let id = micros.to_string();
        let answered = send(&hasty.layer(write(&pool)), request(&id)).await.status();
        let effects = database.effects_and_key(&id).await;
        assert!(effects == 1 || answered == 503, "{id}: {answered}");
        until_acknowledged(&patient, &id).await;
        assert_eq!(database.effects_and_key(&id).await, 1, "{id}");
    }
    database.until_no_transaction_is_open().await;
}

/// COMMIT takes longer than the handler may run, and succeeds. The sender gets a 504, and the retry finds the key
/// complete.
#[tokio::test]
async fn commit_after_the_timeout_is_found_by_the_retry() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    PostgresAdapter::new(pool.clone()).migrate().await.unwrap();
    let hasty = transactional(&pool).wait(Duration::ZERO);
    let service = hasty.handler_timeout(Duration::from_secs(3)).layer(write(&pool));
    let gate = database.gate("COMMIT AFTER INSERT ON effects").await;
    let response = send(&service, request("a")).await;
    assert_eq!(answered(&response), (504, Some("handler-timeout")));
    let response = send(&service, request("a")).await;
    assert_eq!(answered(&response), (503, Some("in-flight")));
    drop(gate);
    until_acknowledged(&service, "a").await;
    assert_eq!((database.effects_and_key("a").await, database.effects.runs().await), (1, 1));
    database.until_no_transaction_is_open().await;
}

/// The runtime ends at any moment of the delivery, and its task ends with it.
#[test]
fn runtime_that_ends_leaves_nothing_behind() {
    let observer = tokio::runtime::Runtime::new().unwrap();
    let database = observer.block_on(Database::fresh());
    let mut unfinished = 0;
    for micros in (0..16_000).step_by(400) {
        for workers in [0, 2] {
            let id = format!("{micros}-{workers}");
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            if workers == 0 {
                builder = tokio::runtime::Builder::new_current_thread();
            } else {
                builder.worker_threads(workers);
            }
            let runtime = builder.enable_all().build().unwrap();
            // The pool's tasks belong to the same runtime.
            let entered = runtime.enter();
            let pool = database.pool(2);
            let service = transactional(&pool).layer(write(&pool));
            drop(entered);
            let event = request(&id);
            let delivery = runtime.spawn(async move { send(&service, event).await.status() });
            runtime.block_on(async { tokio::time::sleep(Duration::from_micros(micros)).await });
            runtime.shutdown_background();
            // The delivery may have been answered before the runtime ended.
            let acknowledged = observer.block_on(delivery).is_ok_and(|status| status == 200);
            observer.block_on(async {
                database.until_no_transaction_is_open().await;
                unfinished += i32::from(!acknowledged);
                if acknowledged {
                    assert_eq!(database.effects.of(&id).await, 1, "{id}");
                }
                let pool = database.pool(2);
                let service = transactional(&pool).layer(write(&pool));
                until_acknowledged(&service, &id).await;
                assert_eq!(database.effects_and_key(&id).await, 1, "{id}");
                pool.close().await;
            });
        }
    }
    assert!(unfinished > 0, "every delivery ended before its runtime");
}

/// Breaks the connection at each message of a delivery in turn. The break comes before the server
/// has the message, while the server executes it, or afterwards.
async fn cut_at_every_message<S, B>(database: &Database, proxy: &Proxy, service: &S, exact: bool)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
{
    until_acknowledged(service, "the schema is there").await;
    for cut in [Cut::Lost, Cut::Unanswered, Cut::Abandoned] {
        for spared in 0..100 {
            let id = format!("{cut:?}-{spared}");
            proxy.set(spared, cut);
            let answered = send(service, request(&id)).await.status();
            let sprung = proxy.sprung();
            if exact {
                let effects = database.effects_and_key(&id).await;
                assert!(effects == 1 || answered != 200, "{id}: {answered}, {sprung:?}");
            }
            until_acknowledged(service, &id).await;
            assert_eq!(database.effects.of(&id).await, 1, "{id}: {sprung:?}");
            if sprung.is_none() {
                assert!(spared > 0, "no message was cut off");
                break;
            }
        }
    }
    database.until_no_transaction_is_open().await;
}

#[tokio::test]
async fn transaction_whose_connection_breaks_at_any_message_loses_and_doubles_nothing() {
    let database = Database::fresh().await;
    let (proxy, pool) = database.proxied(2).await;
    let service = transactional(&pool).layer(write(&pool));
    cut_at_every_message(&database, &proxy, &service, true).await;
}

/// No process dies, so under a lease no event runs twice either.
#[tokio::test]
async fn lease_whose_connection_breaks_at_any_message_loses_and_doubles_nothing() {
    let database = Database::fresh().await;
    let (proxy, pool) = database.proxied(2).await;
    let layer = DedupLayer::new(by_header(), PostgresAdapter::new(pool));
    let handle = layer.handle();
    let service = layer.layer(apart(&database));
    cut_at_every_message(&database, &proxy, &service, false).await;
    tokio::time::timeout(MINUTE, handle.drain()).await.expect("an end");
}

#[tokio::test]
async fn on_arrival_connection_that_breaks_at_any_message_loses_and_doubles_nothing() {
    let database = Database::fresh().await;
    let (proxy, pool) = database.proxied(2).await;
    let layer = DedupLayer::on_arrival(by_header(), PostgresAdapter::new(pool));
    cut_at_every_message(&database, &proxy, &layer.layer(apart(&database)), false).await;
}

/// An `ErrorResponse` of a server that panics, as it does if the disk of its log is full.
const PANIC: &[u8] = b"E\0\0\0\x2cSPANIC\0VPANIC\0C53100\0Mthe disk is full\0\0";

/// The server has written the claim to its log, and dies of the full disk before it replies.
#[tokio::test]
async fn claim_whose_server_panics_is_not_taken_for_refused() {
    let database = Database::fresh().await;
    let (proxy, pool) = database.proxied(2).await;
    let adapter = PostgresAdapter::new(pool);
    for id in ["a", "b", "c", "d"].map(dedup_key) {
        let terms = CallTerms::on_claim(Token::random(), MINUTE);
        adapter.claim(&dedup_key("warm"), &terms).await.unwrap();
        proxy.set(0, Cut::Replied(PANIC));
        let claimed = adapter.claim(&id, &terms).await;
        assert!(proxy.sprung().is_some());
        assert!(matches!(claimed, Ok(FIRST)), "{claimed:?}");
    }
}

/// The client loses its connection, and the server still executes the statement. The repetition
/// waits for a lock for less time than that. The outcome of the claim is unknown, not refused. If
/// it counted as refused, an on-arrival event would be lost, and a leased key would be blocked for
/// a minute.
#[tokio::test]
async fn claim_whose_connection_broke_is_not_taken_for_refused() {
    cut_off_at_commit(|adapter| DedupLayer::on_arrival(by_header(), adapter).wait(Duration::ZERO))
        .await;
    cut_off_at_commit(|adapter| DedupLayer::new(by_header(), adapter).lease(10 * MINUTE)).await;
}

async fn cut_off_at_commit<L: Ledger>(layer: impl FnOnce(PostgresAdapter) -> DedupLayer<L>) {
    let database = Database::fresh().await;
    let (proxy, pool) = database.proxied(2).await;
    let adapter = PostgresAdapter::new(pool);
    adapter.migrate().await.unwrap();
    let service = layer(adapter).store_timeout(MINUTE / 2).layer(apart(&database));
    let gate = database.gate("COMMIT AFTER INSERT ON webhook_deliveries").await;
    // The messages, on the connection of the migration: prepare the statement; execute it.
    proxy.set(1, Cut::Abandoned);
    assert_eq!(send(&service, request("a")).await.status(), 503);
    let sprung = proxy.sprung();
    assert!(sprung.as_ref().is_some_and(|message| message.starts_with('B')), "{sprung:?}");
    drop(gate);
    until_acknowledged(&service, "a").await;
    assert_eq!(database.effects.of("a").await, 1);
}

/// A repetition would delete the row of the later delivery, and the next delivery of its event would run.
#[tokio::test]
async fn forget_whose_reply_is_lost_keeps_the_row_of_a_later_delivery() {
    let database = Database::fresh().await;
    let direct = PostgresAdapter::new(database.pool(2));
    let proxy = to_postgres(&database.options()).await;
    // The adapter's connection. The next one opens after the later delivery.
    let gate = Arc::new(Semaphore::new(1));
    let closed = Arc::clone(&gate);
    let pool = PgPoolOptions::new().max_connections(1).after_connect(move |_, _| {
        let gate = Arc::clone(&closed);
        Box::pin(async move {
            gate.acquire().await.unwrap().forget();
            Ok(())
        })
    });
    let pool = pool.connect_lazy_with(through(proxy.port(), database.options()));
    let adapter = PostgresAdapter::new(pool.clone());
    let terms = || CallTerms::on_claim(Token::random(), 10 * MINUTE);
    let complete = async |key: &DedupKey| direct.claim(key, &terms()).await.unwrap();
    let [first, key] = [dedup_key("first"), dedup_key("a")];
    assert_eq!(complete(&key).await, FIRST);
    // These calls look for the table and prepare the statement.
    for _ in 0..2 {
        assert_eq!(complete(&first).await, FIRST);
        assert_eq!(adapter.forget(&first).await.unwrap(), ForgetReply::Removed);
    }
    // The row is read first.
    proxy.set(1, Cut::Unanswered);

    let forgetting = tokio::spawn({
        let (adapter, key) = (adapter.clone(), key.clone());
        async move { adapter.forget(&key).await }
    });
    let later = async { while complete(&key).await != FIRST {} };
    tokio::time::timeout(MINUTE, later).await.expect("the row is deleted");
    gate.add_permits(1);
    let error = forgetting.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(proxy.sprung().is_some_and(|message| !message.starts_with('S')));
    assert!(matches!(complete(&key).await, ClaimReply::Duplicate(_)));
}
