//! Failover: a primary goes away, and its standby takes its place behind the same address.
//!
//! With a synchronous standby no acknowledged event is lost. With an asynchronous standby, the keys
//! that the standby had not received are lost. Under the transactional ledger their effects are
//! lost as well.

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::future::Future;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use http::{Request, Response};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection, PgPool};
use tokio::task::JoinHandle;
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, Token};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::internals::with_postgres_bounds;
use tower_dedup::{DedupLayer, OnInFlight, ResponseBody};

use super::postgres_demoted::looks;
use crate::support::cluster::{Cluster, blocking, scalar};
use crate::support::effects::{
    Boxed, Effects, answer, commit_effect, complete_in, effect, until_acknowledged,
    writes_and_waits,
};
use crate::support::{
    Body, FIRST, Handler, by_header, dedup_key, on_claim, request, result, send, spawn_send,
};

const HOUR: Duration = Duration::from_secs(3_600);
/// A run ends long before this bound. Only a test that hangs reaches it.
const FOR_EVER: Duration = Duration::from_secs(40);
/// Longer than a failover takes here, so that only an outage ends leases.
const LEASE: Duration = Duration::from_secs(3);
const SENDERS: usize = 32;

type Service = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), HOUR, HOUR)
}

/// Without `looks`, a handler's own pool would keep its connections to a demoted server.
fn pool_of(url: &str, connections: u32, synchronous_commit: &str) -> PgPool {
    let options: PgConnectOptions = url.parse().unwrap();
    looks()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(2))
        .connect_lazy_with(options.options([("synchronous_commit", synchronous_commit)]))
}

/// A handler that writes its effect in a transaction that completes the delivery.
fn within(pool: &PgPool) -> Boxed {
    let pool = pool.clone();
    Boxed::new(tower::service_fn(move |request: Request<Body>| {
        let pool = pool.clone();
        async move {
            let event = request.extensions().get().unwrap();
            Ok(answer(commit_effect(&pool, event, pause(10)).await.is_ok()))
        }
    }))
}

/// A handler that writes its effect on a connection of its own.
fn beside(pool: &PgPool) -> Boxed {
    let pool = pool.clone();
    Boxed::new(tower::service_fn(move |request: Request<Body>| {
        let pool = pool.clone();
        async move {
            let written = match pool.acquire().await {
                Ok(mut connection) => {
                    effect(&mut connection, request.extensions().get().unwrap()).await
                }
                Err(error) => Err(error),
            };
            pause(10).await;
            Ok(answer(written.is_ok()))
        }
    }))
}

async fn pause(most: u64) {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..=most))).await;
}

/// The service of one process, with a pool of its own.
fn transactional(url: &str) -> Service {
    let pool = pool_of(url, 8, "local");
    let layer = DedupLayer::transactional(by_header(), PostgresAdapter::new(pool.clone()));
    Service::new(layer.lease(LEASE).layer(within(&pool)))
}

fn lease(url: &str, handler: Boxed) -> Service {
    let adapter = PostgresAdapter::new(pool_of(url, 8, "local"));
    Service::new(DedupLayer::new(by_header(), adapter).lease(LEASE).layer(handler))
}

/// Senders that deliver each event to both services at once, until both have acknowledged the
/// event.
struct Load {
    services: [Service; 2],
    sent: AtomicUsize,
    acknowledged: Mutex<HashSet<usize>>,
    /// The events delivered during an outage.
    interrupted: Mutex<HashSet<usize>>,
    /// The number is odd during an outage.
    outage: AtomicUsize,
    stop: AtomicBool,
    answers: Mutex<BTreeMap<String, usize>>,
}

fn id(event: usize) -> String {
    format!("event-{event}")
}

impl Load {
    fn start(services: [Service; 2]) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let load = Arc::new(Self {
            services,
            sent: AtomicUsize::new(0),
            acknowledged: Mutex::default(),
            interrupted: Mutex::default(),
            outage: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            answers: Mutex::default(),
        });
        let sender = || tokio::spawn(Arc::clone(&load).sends());
        let senders = (0..SENDERS).map(|_| sender()).collect();
        (load, senders)
    }

    async fn sends(self: Arc<Self>) {
        while !self.stop.load(Ordering::SeqCst) {
            let event = self.sent.fetch_add(1, Ordering::SeqCst);
            tokio::join!(self.deliver(0, event), self.deliver(1, event));
            self.acknowledged.lock().unwrap().insert(event);
        }
    }

    /// Delivers the event until it is acknowledged. Returns the layer's result header, if the layer
    /// acknowledged the event and not the handler.
    async fn deliver(&self, service: usize, event: usize) -> Option<String> {
        loop {
            let before = self.outage.load(Ordering::SeqCst);
            let response = send(&self.services[service], request(&id(event))).await;
            let after = self.outage.load(Ordering::SeqCst);
            if before % 2 == 1 || before != after {
                self.interrupted.lock().unwrap().insert(event);
            }
            let why = result(&response).map(str::to_owned);
            let status = response.status().as_u16();
            let shown = format!("{status} {}", why.as_deref().unwrap_or("handler"));
            *self.answers.lock().unwrap().entry(shown).or_default() += 1;
            if status == 200 {
                return why;
            }
            pause(30).await;
        }
    }

    /// Runs `outage` while deliveries are sent.
    async fn during_an_outage<T>(&self, outage: impl Future<Output = T>) -> T {
        self.outage.fetch_add(1, Ordering::SeqCst);
        let done = outage.await;
        self.outage.fetch_add(1, Ordering::SeqCst);
        done
    }

    fn sent(&self) -> usize {
        self.sent.load(Ordering::SeqCst)
    }

    fn answers(&self) -> BTreeMap<String, usize> {
        self.answers.lock().unwrap().clone()
    }

    fn acknowledged(&self) -> HashSet<usize> {
        self.acknowledged.lock().unwrap().clone()
    }

    async fn until_acknowledged(&self, more: usize) {
        let count = || self.acknowledged.lock().unwrap().len();
        let enough = count() + more;
        let all = async {
            while count() < enough {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let done = tokio::time::timeout(FOR_EVER, all).await;
        let answers = self.answers();
        assert!(done.is_ok(), "{} and not {enough} are acknowledged: {answers:?}", count());
    }

    /// Waits until every event that was sent is acknowledged.
    async fn end(&self, senders: Vec<JoinHandle<()>>) {
        self.stop.store(true, Ordering::SeqCst);
        let ended = tokio::time::timeout(FOR_EVER, join_all(senders)).await;
        for sender in ended.expect("every event is acknowledged") {
            sender.unwrap();
        }
        let answers = self.answers();
        let known = [
            "200 handler",
            "200 duplicate",
            "500 handler",
            "500 uncommitted",
            "503 in-flight",
            "503 unavailable",
        ];
        assert!(answers.keys().all(|answer| known.contains(&&**answer)), "{answers:?}");
    }

    /// Asserts that the database knows every event that was sent.
    async fn assert_complete(&self, url: &str) {
        let known = complete(url).await;
        let lost: Vec<_> = (0..self.sent()).filter(|event| !known.contains(event)).collect();
        assert_eq!((lost, known.len()), (Vec::new(), self.sent()), "lost events");
    }

    /// Delivers every event again. Returns the events whose handler ran.
    async fn again(&self) -> HashSet<usize> {
        let all = stream::iter(0..self.sent())
            .map(|event| async move { (event, self.deliver(event % 2, event).await) });
        let all = all.buffer_unordered(SENDERS).collect::<Vec<_>>();
        let all = tokio::time::timeout(FOR_EVER, all).await.expect("every event is acknowledged");
        all.into_iter().filter(|(_, why)| why.is_none()).map(|(event, _)| event).collect()
    }
}

fn ids(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(id)
}

/// Returns the events whose keys are complete.
async fn complete(url: &str) -> HashSet<usize> {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let sql = "SELECT id FROM webhook_deliveries WHERE completed_at IS NOT NULL";
    let ids: Vec<String> = sqlx::query_scalar(sql).fetch_all(&mut connection).await.unwrap();
    ids.iter().map(|id| id.strip_prefix("event-").unwrap().parse().unwrap()).collect()
}

/// How a primary is lost.
#[derive(Clone, Copy)]
enum Loss {
    Killed,
    /// The primary still serves its connections, and refuses writes.
    Demoted,
}

/// Loses several primaries of synchronous standbys under load, one after the other.
async fn with_a_synchronous_standby(
    services: impl Fn(&str) -> [Service; 2],
    losses: &[Loss],
) -> (Cluster, Arc<Load>, Effects) {
    let mut cluster = Cluster::synchronous().await;
    let url = cluster.address.url();
    let effects = Effects::create(&url).await;
    let (load, senders) = Load::start(services(&url));
    // The demoted servers run until the end.
    let mut demoted = Vec::new();
    for loss in losses {
        load.until_acknowledged(150).await;
        match loss {
            Loss::Killed => load.during_an_outage(cluster.fail_over()).await,
            Loss::Demoted => demoted.push(load.during_an_outage(cluster.switch_over()).await),
        }
    }
    load.until_acknowledged(150).await;
    load.end(senders).await;
    let seen = load.answers();
    let killed = losses.len() > demoted.len();
    assert!(
        !killed || seen.contains_key("503 unavailable"),
        "no delivery met the failover: {seen:?}"
    );
    for demoted in demoted {
        let met = demoted.log().contains("in a read-only transaction");
        assert!(met, "no delivery met the demoted server: {seen:?}");
    }
    load.assert_complete(&url).await;
    assert_eq!(load.again().await, HashSet::new(), "an acknowledged event ran again");
    println!(
        "{} events, {} interrupted: {seen:?}",
        load.sent(),
        load.interrupted.lock().unwrap().len()
    );
    (cluster, load, effects)
}

#[tokio::test(flavor = "multi_thread")]
async fn transactional_with_a_synchronous_standby_loses_and_doubles_nothing() {
    let services = |url: &str| [transactional(url), transactional(url)];
    let (_cluster, load, effects) = with_a_synchronous_standby(services, &[Loss::Killed; 3]).await;
    effects.assert_once(ids(load.sent())).await;
}

/// The pools' connections stay open, and lead to the old primary.
#[tokio::test(flavor = "multi_thread")]
async fn transactional_after_a_demotion_loses_and_doubles_nothing() {
    let services = |url: &str| [transactional(url), transactional(url)];
    let (_cluster, load, effects) = with_a_synchronous_standby(services, &[Loss::Demoted; 2]).await;
    effects.assert_once(ids(load.sent())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_with_a_synchronous_standby_loses_nothing_and_doubles_what_was_running() {
    let services = |url: &str| {
        // The answer of a handler stands, even if its key cannot be completed. So the handler's own
        // COMMIT must wait for the standby.
        let handler = beside(&pool_of(url, 8, "on"));
        [lease(url, handler.clone()), lease(url, handler)]
    };
    let (_cluster, load, effects) = with_a_synchronous_standby(services, &[Loss::Killed; 3]).await;
    let (mut all, interrupted) = (effects.all().await, load.interrupted.lock().unwrap());
    let mut doubled = 0;
    for event in 0..load.sent() {
        let runs = all.remove(&id(event)).unwrap_or_default();
        assert!(!runs.is_empty(), "event {event} is lost");
        assert!(runs.len() == 1 || interrupted.contains(&event), "event {event}: {runs:?}");
        doubled += runs.len() - 1;
    }
    assert!(all.is_empty(), "{all:?}");
    println!("{doubled} runs were repeated");
}

/// The standby stops at a random moment under load. Then the primary is killed, and the standby is
/// promoted. The standby has not received the last writes.
async fn with_an_asynchronous_standby(
    services: impl Fn(&str) -> [Service; 2],
) -> (Cluster, Arc<Load>) {
    let mut cluster = Cluster::asynchronous().await;
    let url = cluster.address.url();
    Effects::create(&url).await;
    let (load, senders) = Load::start(services(&url));
    load.until_acknowledged(150).await;
    let before = load.acknowledged();
    cluster.until_received().await;
    let standby = Arc::clone(&cluster.standby);
    blocking(move || standby.stop_immediately()).await;
    let first_unreceived = load.sent();
    load.until_acknowledged(150).await;
    let (primary, standby) = (Arc::clone(&cluster.primary), Arc::clone(&cluster.standby));
    let acknowledged = load
        .during_an_outage(async {
            blocking(move || primary.stop_immediately()).await;
            let acknowledged = load.acknowledged();
            blocking(move || standby.start_again()).await;
            cluster.promote().await;
            acknowledged
        })
        .await;
    load.until_acknowledged(50).await;
    load.end(senders).await;

    let known = complete(&url).await;
    let lost: HashSet<_> = acknowledged.difference(&known).copied().collect();
    let (count, all) = (lost.len(), acknowledged.len());
    println!("{count} of {all} acknowledged events are lost, from {:?} on", lost.iter().min());
    assert!(lost.is_disjoint(&before), "the standby had received {lost:?}");
    let unreceived: Vec<_> =
        acknowledged.into_iter().filter(|event| *event >= first_unreceived).collect();
    assert!(unreceived.len() > 50, "{} events: too few to show anything", unreceived.len());
    assert!(
        unreceived.iter().all(|event| lost.contains(event)),
        "the standby knows events that it had not received"
    );
    // An event without acknowledgement at the kill was delivered again until it was acknowledged.
    assert_eq!(known.len() + count, load.sent());
    assert_eq!(load.again().await, lost, "the events that ran again");
    load.assert_complete(&url).await;
    (cluster, load)
}

/// Keys and effects are lost together. A redelivery restores both.
#[tokio::test(flavor = "multi_thread")]
async fn transactional_with_an_asynchronous_standby_loses_what_it_has_not_received() {
    let services = |url: &str| [transactional(url), transactional(url)];
    let (cluster, load) = with_an_asynchronous_standby(services).await;
    let effects = Effects::over(pool_of(&cluster.address.url(), 2, "on"));
    effects.assert_once(ids(load.sent())).await;
}

/// Commits of the role do not wait for the standby. Acknowledged writes of the adapter do. (With
/// `remote_write`, a commit also waits for an absent standby.)
#[tokio::test(flavor = "multi_thread")]
async fn writes_of_a_role_that_does_not_wait_for_the_standby_wait_for_it() {
    let mut cluster = Cluster::synchronous().await;
    let url = cluster.address.url();
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
    let cluster = Cluster::synchronous().await;
    let url = cluster.address.url();
    let effects = Effects::create(&url).await;
    let pool = pool_of(&url, 4, "on");
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    let layer = DedupLayer::transactional(by_header(), adapter).on_in_flight(OnInFlight::Reject);
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
        pause(100).await;
        assert_eq!(scalar::<i64>(&mut admin, commits).await, 1);
        assert_eq!(effects.of("event").await, 0, "visible without the standby");
    }
    let standby = Arc::clone(&cluster.standby);
    blocking(move || standby.start_again()).await;
    until_acknowledged(&service, "event").await;
    assert_eq!(effects.of("event").await, 1);
    assert_eq!(result(&send(&service, request("event")).await), Some("duplicate"));
}
