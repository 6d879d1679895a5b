//! Connections to Postgres that carry no more bytes and are not reset, as after the loss of a
//! machine or of a firewall state. The caller gets its answer in time. The next delivery succeeds
//! over a fresh connection. No event is lost, and no task or permit is left.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::{Request, Response};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, Executor, PgPool};
use tower::{Layer, Service, ServiceExt};
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::ledger::Transactional;
use tower_dedup::{DedupHandle, DedupLayer, Delivery};

use support::effects::{Boxed, Database, MINUTE, answer, apart, until_acknowledged, write};
use support::proxy::{Cut, through, to_postgres};
use support::{Body, Handler, by_header, dedup_key, request, send, until, until_async};

pub(super) const STORE_TIMEOUT: Duration = Duration::from_millis(400);
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_millis(900);
/// The sum of several bounds, on a busy machine.
pub(super) const IN_TIME: Duration = Duration::from_secs(10);
const CONNECTIONS: u32 = 2;
/// The server ends a handler's transaction that has fallen silent, which holds the row of its event: by default after a
/// minute.
const IDLE_BOUND: Duration = Duration::from_secs(5);

pub(super) fn adapter(pool: &PgPool) -> PostgresAdapter {
    adapter_with(pool, STATEMENT_TIMEOUT)
}

pub(super) fn adapter_with(pool: &PgPool, statement: Duration) -> PostgresAdapter {
    let options = PostgresOptions::new().statement_timeout(statement);
    let options = options.transaction_idle_timeout(IDLE_BOUND);
    PostgresAdapter::with_options(pool.clone(), options)
}

/// A layer over this adapter, around a handler: the given one, or one that writes over this pool.
pub(super) type Build = fn(&PgPool, PostgresAdapter, Boxed) -> (DedupHandle, Boxed);

/// A handler that writes its effect over connections that work. They belong to the runtime of the
/// test, because the runtime of a delivery ends before the test does.
pub(super) fn sound(database: &Database) -> Boxed {
    let (runtime, handler) = (tokio::runtime::Handle::current(), apart(database));
    Boxed::new(tower::service_fn(move |request| {
        let run = runtime.spawn(handler.clone().oneshot(request));
        async move { run.await.unwrap() }
    }))
}

fn boxed<S, B>(service: S) -> Boxed
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    Boxed::new(tower::util::MapResponse::new(service, |response: Response<B>| {
        response.map(|_| Body::default())
    }))
}

fn under_lease(adapter: PostgresAdapter) -> DedupLayer {
    DedupLayer::new(by_header(), adapter).store_timeout(STORE_TIMEOUT)
}

pub(super) fn lease(_: &PgPool, adapter: PostgresAdapter, handler: Boxed) -> (DedupHandle, Boxed) {
    let layer = under_lease(adapter);
    (layer.handle(), boxed(layer.layer(handler)))
}

/// The handler fails the first time, so that its key is released.
fn failing_lease(_: &PgPool, adapter: PostgresAdapter, handler: Boxed) -> (DedupHandle, Boxed) {
    let layer = under_lease(adapter);
    let handler = tower::service_fn(move |request: Request<Body>| {
        let mut handler = handler.clone();
        async move {
            let delivery: &Delivery = request.extensions().get().unwrap();
            if delivery.attempt() == 1 {
                return Ok::<_, Infallible>(answer(false));
            }
            handler.call(request).await
        }
    });
    (layer.handle(), boxed(layer.layer(handler)))
}

pub(super) fn on_arrival(
    _: &PgPool,
    adapter: PostgresAdapter,
    handler: Boxed,
) -> (DedupHandle, Boxed) {
    let layer = DedupLayer::on_arrival(by_header(), adapter).store_timeout(STORE_TIMEOUT);
    (layer.handle(), boxed(layer.layer(handler)))
}

fn transactional(adapter: PostgresAdapter) -> DedupLayer<Transactional> {
    let layer = DedupLayer::transactional(by_header(), adapter).store_timeout(STORE_TIMEOUT);
    layer.lease(Duration::from_secs(1)).handler_timeout(2 * STORE_TIMEOUT)
}

/// The handler has nothing to write in a transaction: it depends on no pool.
pub(super) fn without_a_transaction(
    _: &PgPool,
    adapter: PostgresAdapter,
    handler: Boxed,
) -> (DedupHandle, Boxed) {
    let layer = transactional(adapter);
    let handler = tower::service_fn(move |request: Request<Body>| {
        request.extensions().get::<Delivery>().unwrap().nothing_to_write();
        handler.clone().oneshot(request)
    });
    (layer.handle(), boxed(layer.layer(handler)))
}

/// Returns a pool that a handler may use, too. sqlx gives a connection back after a ping without a bound: without this
/// one, a silent connection would keep its place in the pool.
fn bounded(connections: u32, options: PgConnectOptions) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(connections).after_release(|connection, _| {
        Box::pin(async move {
            let ping = tokio::time::timeout(STATEMENT_TIMEOUT, connection.ping()).await;
            ping.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map(|()| true)
        })
    });
    pool.acquire_timeout(2 * STATEMENT_TIMEOUT).connect_lazy_with(options)
}

/// The handler bounds the time that it waits for its statement.
pub(super) fn in_a_transaction(
    pool: &PgPool,
    adapter: PostgresAdapter,
    _: Boxed,
) -> (DedupHandle, Boxed) {
    let (layer, handler) = (transactional(adapter), write(pool));
    let handler = tower::service_fn(move |request: Request<Body>| {
        let written = tokio::time::timeout(STORE_TIMEOUT, handler.clone().oneshot(request));
        async move { written.await.unwrap_or_else(|_| Ok(answer(false))) }
    });
    (layer.handle(), boxed(layer.layer(handler)))
}

pub(super) const WARM: &str = "warm";

/// Runs one delivery, one message of which falls silent. The delivery has its own runtime, so that
/// its tasks can be counted. Returns the number of messages.
///
/// Only the ledger's own connections and tasks are counted: `is_alone` if the handler does not use the pool.
async fn silenced(
    database: &Database,
    (build, is_alone): (Build, bool),
    cut: Option<(usize, Cut)>,
    id: &str,
) -> usize {
    let proxy = to_postgres(&database.options()).await;
    let options = through(proxy.port(), database.options());
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let handler = sound(database);
    let (pool, handle, service) = {
        let _entered = runtime.enter();
        let pool = bounded(CONNECTIONS, options);
        let (handle, service) = build(&pool, adapter(&pool), handler);
        (pool, handle, service)
    };
    let (messages, id, event) = (proxy.clone(), id.to_owned(), request(id));
    let run = runtime.spawn({
        let pool = pool.clone();
        async move {
            until_acknowledged(&service, WARM).await;
            // Messages of connections on their way back to the pool do not belong to the delivery.
            until(|| pool.num_idle() == pool.size() as usize).await;
            match cut {
                Some((spared, cut)) => messages.set(spared, cut),
                None => messages.set(usize::MAX, Cut::Lost),
            }
            let start = Instant::now();
            let answered = send(&service, event).await.status();
            assert!(start.elapsed() < IN_TIME, "answered {answered} after {:?}", start.elapsed());
            let start = Instant::now();
            until_acknowledged(&service, &id).await;
            assert!(start.elapsed() < MINUTE, "acknowledged after {:?}", start.elapsed());
            if cut.is_some() {
                messages.sprung();
            }
            tokio::time::timeout(MINUTE, handle.drain()).await.expect("the handle drains");
            assert_eq!((handle.running(), handle.pending_writes()), (0, 0));
            if !is_alone {
                return;
            }
            // Every permit of the pool can be acquired again.
            let all = join_all((0..CONNECTIONS).map(|_| pool.acquire()));
            let all = tokio::time::timeout(2 * IN_TIME, all).await.expect("all connections");
            assert!(all.iter().all(Result::is_ok), "{all:?}");
        }
    });
    run.await.unwrap();
    let metrics = runtime.metrics();
    if is_alone {
        // The pool has one task of its own.
        until(|| metrics.num_alive_tasks() <= 1).await;
        runtime.spawn(async move { pool.close().await }).await.unwrap();
        until(|| metrics.num_alive_tasks() == 0).await;
    }
    runtime.shutdown_background();
    proxy.close();
    proxy.messages()
}

async fn silent_at_every_message(build: Build, is_alone: bool, at_least: usize) {
    let build = (build, is_alone);
    let database = Database::fresh().await;
    let all = silenced(&database, build, None, "heard").await;
    assert!(all >= at_least, "{all} messages only");
    let cuts = (0..all).flat_map(|at| [(at, Cut::Silent), (at, Cut::SilentUnanswered)]);
    let runs = cuts.map(|(at, cut)| {
        let database = &database;
        async move {
            let id = format!("{cut:?}-{at}");
            silenced(database, build, Some((at, cut)), &id).await;
            assert_eq!(database.effects.of(&id).await, 1, "{id}");
        }
    });
    // Twelve runs at a time, because each run has its own connections and threads.
    let mut runs: Vec<_> = runs.collect();
    while !runs.is_empty() {
        let some = runs.split_off(runs.len().saturating_sub(12));
        join_all(some).await;
    }
    database.until_no_transaction_is_open().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_over_a_silent_connection_loses_and_doubles_nothing() {
    silent_at_every_message(lease, true, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_over_a_silent_connection_frees_the_key() {
    silent_at_every_message(failing_lease, true, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_arrival_over_a_silent_connection_loses_and_doubles_nothing() {
    silent_at_every_message(on_arrival, true, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_over_a_silent_connection_loses_and_doubles_nothing() {
    silent_at_every_message(in_a_transaction, false, 10).await;
}

/// Another process of the service, with the default timeouts, is without a store for a short time only.
#[tokio::test]
async fn service_recovers_within_4_s_after_all_connections_have_fallen_silent() {
    const SOON: Duration = Duration::from_secs(4);
    let database = Database::fresh().await;
    for is_lease in [true, false] {
        let (proxy, pool) = database.proxied(4).await;
        let (adapter, handler) = (PostgresAdapter::new(pool), sound(&database));
        // More connections than the queue has workers.
        let key = dedup_key("a");
        join_all((0..4).map(|_| adapter.get(&key))).await;
        let service = if is_lease {
            boxed(DedupLayer::new(by_header(), adapter).layer(handler))
        } else {
            boxed(DedupLayer::on_arrival(by_header(), adapter).layer(handler))
        };
        let crowd = |when: &'static str| {
            join_all((0..200).map(|number| {
                let (service, id) = (service.clone(), format!("{is_lease}-{when}-{number}"));
                tokio::spawn(async move { send(&service, request(&id)).await.status() })
            }))
        };
        crowd("before").await;
        let during = tokio::spawn(crowd("during"));
        proxy.silence();
        let start = Instant::now();
        until_acknowledged(&service, &format!("{is_lease}-after")).await;
        assert!(start.elapsed() < SOON, "acknowledged after {:?}", start.elapsed());
        tokio::time::timeout(IN_TIME, during).await.expect("answers in time").unwrap();
    }
}

/// So does the pool of the handlers, whose idle connections sqlx tests without a bound: for one event at a time, and for
/// many at once.
#[tokio::test]
async fn transactions_begin_within_5_s_after_all_connections_have_fallen_silent() {
    const SOON: Duration = Duration::from_secs(5);
    let database = Database::fresh().await;
    for (connections, events) in [(1, 1), (10, 1), (10, 50)] {
        let (proxy, pool) = database.proxied(connections).await;
        let service = support::effects::transactional(&pool).layer(write(&pool));
        let all = join_all((0..connections).map(|_| pool.acquire())).await;
        assert!(all.iter().all(Result::is_ok));
        drop(all);
        let id = |event: &str| format!("{connections} {events} {event}");
        until_acknowledged(&service, &id("before")).await;
        let size = usize::try_from(connections).unwrap();
        until(|| pool.num_idle() == size).await;
        proxy.silence();
        let start = Instant::now();
        let ids: Vec<_> = (0..events).map(|event| id(&format!("{event}"))).collect();
        join_all(ids.iter().map(|id| until_acknowledged(&service, id))).await;
        assert!(start.elapsed() < SOON, "{connections} {events}: {:?}", start.elapsed());
        for id in &ids {
            assert_eq!(database.effects_and_key(id).await, 1);
        }
    }
}

/// The guide's `after_release` ends a transaction that was left open, and closes a connection that has fallen silent in use.
#[tokio::test]
async fn after_release_of_the_guide_keeps_no_open_transaction_and_no_silent_connection() {
    let database = Database::fresh().await;
    let proxy = to_postgres(&database.options()).await;
    let pool = PgPoolOptions::new().max_connections(1).after_release(|connection, _| {
        Box::pin(async move {
            let ends = connection.execute("BEGIN; ROLLBACK");
            let ended = tokio::time::timeout(Duration::from_secs(1), ends).await;
            Ok(matches!(ended, Ok(Ok(_))))
        })
    });
    let pool = pool.connect_lazy_with(through(proxy.port(), database.options()));
    let write = async || pool.execute("INSERT INTO effects (id) VALUES ('after')").await.unwrap();
    for statement in ["INSERT INTO effects (id) VALUES ('left open')", "SELECT nonsense"] {
        let mut connection = pool.acquire().await.unwrap();
        connection.execute("BEGIN").await.unwrap();
        drop(connection.execute(statement).await);
        drop(connection);
        write().await;
    }
    let used = pool.acquire().await.unwrap();
    proxy.silence();
    drop(used);
    tokio::time::timeout(IN_TIME, write()).await.expect("a new connection");
    assert_eq!(
        (database.effects.of("left open").await, database.effects.of("after").await),
        (0, 3)
    );
}

/// The lease is renewed over a fresh connection, so that no other process takes the event over.
#[tokio::test]
async fn lease_is_renewed_when_all_connections_fall_silent() {
    let database = Database::fresh().await;
    let (proxy, pool) = database.proxied(2).await;
    let held = Handler::default();
    let lease = Duration::from_secs(4);
    let layer = DedupLayer::new(by_header(), adapter(&pool));
    let layer = layer.store_timeout(STORE_TIMEOUT).lease(lease);
    let service = layer.layer(held.service());
    // Another process, whose connections work.
    let other = Handler::default();
    let healthy = DedupLayer::new(by_header(), PostgresAdapter::new(database.pool(2)));
    let healthy = healthy.wait(Duration::ZERO).lease(lease);
    let healthy = healthy.layer(other.service());
    held.hold();
    let delivery = tokio::spawn(async move { send(&service, request("a")).await.status() });
    held.running(1).await;
    proxy.silence();
    let start = Instant::now();
    while start.elapsed() < 2 * lease {
        assert_eq!(send(&healthy, request("a")).await.status(), 503, "{:?}", start.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!held.last().lease_lost());
    held.release();
    assert_eq!(delivery.await.unwrap(), 200);
    assert_eq!((held.runs(), other.runs()), (1, 0));
}

/// The purger's statement has a bound, too. A caller that drops the purge leaves no connection
/// behind.
#[tokio::test]
async fn purging_over_a_silent_connection_ends() {
    let database = Database::fresh().await;
    adapter(&database.pool(1)).migrate().await.unwrap();
    let cuts = (0..8).flat_map(|at| [(at, Cut::Silent), (at, Cut::SilentUnanswered)]);
    let failed = join_all(cuts.map(async |(at, cut)| {
        let proxy = to_postgres(&database.options()).await;
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(STATEMENT_TIMEOUT);
        let pool = pool.connect_lazy_with(through(proxy.port(), database.options()));
        let purging = adapter_with(&pool, STORE_TIMEOUT / 4);
        until_async(async || purging.purge(10).await.is_ok()).await;
        proxy.set(at, cut);
        let purged = tokio::time::timeout(IN_TIME, purging.purge(10)).await;
        let failed = purged.expect("an end").is_err();
        proxy.sprung();
        until_async(async || purging.purge(10).await.is_ok()).await;
        failed
    }));
    assert!(failed.await.contains(&true), "no message fell silent");
}

/// The host accepts the connection and says nothing.
#[tokio::test]
async fn connecting_to_a_silent_host_ends() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("postgres://app@{}/app", silent.local_addr().unwrap());
    let connected = tokio::time::timeout(IN_TIME, PostgresAdapter::connect(&url)).await;
    let error = connected.expect("an end").unwrap_err();
    assert_eq!(error.kind(), tower_dedup::StoreErrorKind::Unavailable, "{error}");
}

/// Workers use the rotated credentials of the pool, too.
#[tokio::test]
async fn workers_follow_the_connect_options_of_the_pool() {
    let database = Database::fresh().await;
    let name = database.name().to_owned();
    for role in ["old", "new"] {
        database.run(format!("CREATE ROLE {name}_{role} LOGIN SUPERUSER")).await;
    }
    let options = |role: &str| database.options().username(&format!("{name}_{role}"));
    let pool = database.pool_with(2, options("old"));
    let adapter = adapter(&pool);
    let claim = async |id: &str| {
        let terms = CallTerms::on_completion([1; 16].into(), MINUTE, MINUTE);
        adapter.claim(&dedup_key(id), &terms).await
    };
    claim("a").await.unwrap();
    pool.set_connect_options(options("new"));
    database.run(format!("ALTER ROLE {name}_old NOLOGIN")).await;
    database.terminate(&format!("usename = '{name}_old'")).await;
    claim("b").await.unwrap();
    let new = format!("usename = '{name}_new'");
    assert!(database.sessions(&new).await > 0, "no session has the new role");
    adapter.close().await;
    pool.close().await;
    database.until_sessions("true", 0).await;
    for role in ["old", "new"] {
        database.run(format!("DROP OWNED BY {name}_{role} CASCADE; DROP ROLE {name}_{role}")).await;
    }
}
