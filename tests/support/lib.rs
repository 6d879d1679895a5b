//! Shared parts of tests: a service to wrap, requests to send, stores and servers of each kind.
#![allow(
    async_fn_in_trait,
    missing_docs,
    missing_debug_implementations,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "for tests only"
)]

pub mod cluster;
pub mod effects;
mod keeper;
pub mod ledgers;
pub mod log;
pub mod places;
pub mod postgres;
pub mod proxy;
pub mod redis;
pub mod secrets;
pub mod time_travel;
pub mod words;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tower::{Service, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, StoredData, Token,
};
use tower_dedup::adapter::maintenance::{KeyState, ListFilter, MaintenanceAdapter};
use tower_dedup::testing::FaultyAdapter;
use tower_dedup::{DedupKey, Delivery, KeyExtractor, StoreError, key};

use ledgers::Inner;

pub type Body = Full<Bytes>;

/// The extractor of most tests.
pub fn by_header() -> KeyExtractor {
    key::header("webhook-id").namespace("test")
}

pub fn dedup_key(id: &str) -> DedupKey {
    DedupKey::new("test", id).unwrap()
}

/// Returns the terms of a claim under a lease of a minute, with a fresh token and a retention of an
/// hour.
pub fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), Duration::from_secs(3_600), Duration::from_secs(60))
}

/// Returns terms with the same token and retention, for a claim that is complete at once.
pub fn on_claim(terms: &CallTerms) -> CallTerms {
    CallTerms::on_claim(terms.token(), terms.retention())
}

/// Returns this many keys with ids of this prefix, in the order that the contract demands.
pub fn sorted_keys(prefix: &str, count: usize) -> Vec<DedupKey> {
    let mut keys: Vec<_> = (0..count).map(|id| dedup_key(&format!("{prefix}-{id}"))).collect();
    keys.sort();
    keys
}

/// Returns a store in memory.
pub fn memory() -> Arc<MemoryAdapter> {
    Arc::new(MemoryAdapter::new())
}

/// Returns the URL of the file `dedup.db` in this folder.
pub fn sqlite_url(dir: &Path) -> String {
    format!("sqlite://{}", dir.join("dedup.db").display())
}

/// Returns the state of [`dedup_key`], if the store has it.
pub async fn state<A: MaintenanceAdapter + ?Sized>(adapter: &A, id: &str) -> Option<KeyState> {
    adapter.get(&dedup_key(id)).await.unwrap().map(|entry| entry.state)
}

/// Returns the number of stored keys, with expired keys that are not purged yet.
pub async fn rows<A: MaintenanceAdapter + ?Sized>(adapter: &A) -> u64 {
    let stats = adapter.stats().await.unwrap();
    assert!(stats.is_exact, "{stats:?}");
    stats.rows
}

/// Lists keys in pages of this size. Returns the keys, and how many calls it took.
pub async fn list<A: MaintenanceAdapter + ?Sized>(
    adapter: &A,
    filter: &ListFilter,
    limit: u32,
) -> (Vec<DedupKey>, usize) {
    let (mut keys, mut after, mut calls) = (Vec::new(), None, 0);
    loop {
        let page = adapter.list(filter, after.as_deref(), limit).await.unwrap();
        assert!(page.keys.len() <= limit as usize);
        keys.extend(page.keys.into_iter().map(|(key, _)| key));
        calls += 1;
        let Some(next) = page.next else { return (keys, calls) };
        assert_ne!(Some(&next), after.as_ref(), "the list goes on");
        after = Some(next);
    }
}

/// Claims several keys at the same time. Returns the reply for each.
pub async fn claim_all<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<Vec<ClaimReply>, StoreError> {
    try_join_all(keys.iter().map(|key| adapter.claim(key, terms))).await
}

/// Completes several keys at the same time. Returns the reply for each.
pub async fn complete_all<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<Vec<CompleteReply>, StoreError> {
    try_join_all(keys.iter().map(|key| adapter.complete(key, terms))).await
}

/// Releases several keys at the same time.
pub async fn release_all<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<(), StoreError> {
    try_join_all(keys.iter().map(|key| adapter.release(key, terms))).await.map(drop)
}

/// Returns the stored data of this key, if the key is complete.
pub async fn stored_data<A: DedupAdapter + ?Sized>(
    adapter: &A,
    key: &DedupKey,
) -> Option<StoredData> {
    let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
    let terms = terms.with_fetch(Fetch::DigestAndResponse);
    match adapter.claim(key, &terms).await.unwrap() {
        ClaimReply::Duplicate(seen) => seen.stored.map(|stored| (*stored).clone()),
        ClaimReply::First { .. } => {
            adapter.release(key, &terms).await.unwrap();
            None
        }
        _ => None,
    }
}

/// The reply to the first claim of a key.
pub const FIRST: ClaimReply = ClaimReply::first(1, false);

pub fn request(id: &str) -> Request<Body> {
    Request::post("/hook").header("webhook-id", id).body(Full::from("payload")).unwrap()
}

/// Returns the same request with this body.
pub fn event(id: &str, body: &'static str) -> Request<Body> {
    request(id).map(|_| Full::from(body))
}

/// Returns the same request for another path.
pub fn request_to(path: &'static str, id: &str) -> Request<Body> {
    let mut request = request(id);
    *request.uri_mut() = http::Uri::from_static(path);
    request
}

/// Sends one request to a clone of the service, and waits for readiness first.
pub async fn send<S, R, B>(service: &S, request: Request<R>) -> Response<B>
where
    S: Service<Request<R>, Response = Response<B>, Error = Infallible> + Clone,
{
    match service.clone().oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// Sends one request as [`send`] does, from a task of its own, which returns the status.
pub fn spawn_send<S, R, B>(service: &S, request: Request<R>) -> JoinHandle<StatusCode>
where
    S: Service<Request<R>, Response = Response<B>, Error = Infallible, Future: Send> + Clone,
    S: Send + 'static,
    R: Send + 'static,
{
    let sent = service.clone().oneshot(request);
    tokio::spawn(async move { sent.await.unwrap_or_else(|never| match never {}).status() })
}

/// Returns the result header, if the layer itself has answered.
pub fn result<B>(response: &Response<B>) -> Option<&str> {
    response.headers().get("x-dedup-result").map(|value| value.to_str().unwrap())
}

/// Returns the status, and the result header if the layer itself has answered.
pub fn answered<B>(response: &Response<B>) -> (u16, Option<&str>) {
    (response.status().as_u16(), result(response))
}

/// Says, if the request has a delivery, that its handler writes nothing.
fn writes_nothing<B>(request: &Request<B>) {
    if let Some(delivery) = request.extensions().get::<Delivery>() {
        delivery.nothing_to_write();
    }
}

/// A handler that counts its runs, answers as the test says, and has nothing to write.
#[derive(Clone, Default)]
pub struct Handler(Arc<State>);

#[derive(Default)]
struct State {
    runs: AtomicUsize,
    running: AtomicUsize,
    /// The statuses of the next runs; 200 when the list is empty.
    statuses: Mutex<Vec<u16>>,
    deliveries: Mutex<Vec<Delivery>>,
    /// While this is true, runs wait for `go`.
    held: Mutex<bool>,
    go: Notify,
}

impl Handler {
    pub fn runs(&self) -> usize {
        self.0.runs.load(Ordering::SeqCst)
    }

    /// Sets the status of the next run. 0 panics, 1 returns an error.
    pub fn then(self, status: u16) -> Self {
        self.0.statuses.lock().unwrap().push(status);
        self
    }

    /// Makes runs wait until [`release`](Self::release).
    pub fn hold(&self) {
        *self.0.held.lock().unwrap() = true;
    }

    pub fn release(&self) {
        *self.0.held.lock().unwrap() = false;
        self.0.go.notify_waiters();
    }

    /// Waits until this many handlers run.
    pub async fn running(&self, runs: usize) {
        until(|| self.0.running.load(Ordering::SeqCst) == runs).await;
    }

    pub fn deliveries(&self) -> Vec<Delivery> {
        self.0.deliveries.lock().unwrap().clone()
    }

    pub fn last(&self) -> Delivery {
        self.deliveries().pop().expect("a delivery")
    }

    pub async fn run<B>(self, request: Request<B>) -> Result<Response<Body>, &'static str> {
        let state = &self.0;
        state.runs.fetch_add(1, Ordering::SeqCst);
        state.running.fetch_add(1, Ordering::SeqCst);
        writes_nothing(&request);
        if let Some(delivery) = request.extensions().get::<Delivery>() {
            state.deliveries.lock().unwrap().push(delivery.clone());
        }
        loop {
            let go = state.go.notified();
            tokio::pin!(go);
            go.as_mut().enable();
            if !*state.held.lock().unwrap() {
                break;
            }
            go.await;
        }
        state.running.fetch_sub(1, Ordering::SeqCst);
        let status = {
            let mut statuses = state.statuses.lock().unwrap();
            if statuses.is_empty() { 200 } else { statuses.remove(0) }
        };
        match status {
            0 => panic!("the handler was told to panic"),
            1 => Err("the handler was told to fail"),
            status => {
                let mut response = Response::new(Full::from("handled"));
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
                Ok(response)
            }
        }
    }

    /// Returns a service that cannot fail (status 1 is not for it).
    pub fn service<B: Send + 'static>(&self) -> impl Inner<B> {
        let handler = self.clone();
        tower::service_fn(move |request| {
            let run = handler.clone().run(request);
            async move { Ok(run.await.expect("a handler that does not fail")) }
        })
    }

    /// Returns a service that can fail.
    pub fn fallible<B: Send + 'static>(
        &self,
    ) -> impl Service<
        Request<B>,
        Response = Response<Body>,
        Error = &'static str,
        Future = impl Future<Output = Result<Response<Body>, &'static str>> + Send,
    > + Clone
    + Send
    + 'static {
        let handler = self.clone();
        tower::service_fn(move |request| handler.clone().run(request))
    }
}

/// Waits until `condition` holds, for a minute at most.
#[track_caller]
pub fn until(condition: impl Fn() -> bool) -> impl Future<Output = ()> {
    until_async(move || std::future::ready(condition()))
}

/// As [`until`].
#[track_caller]
pub fn until_async<F: Future<Output = bool>>(
    mut condition: impl FnMut() -> F,
) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        // By the clock of the test, which may be paused.
        let end = tokio::time::Instant::now() + Duration::from_secs(60);
        while tokio::time::Instant::now() < end {
            if condition().await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("the condition at {caller} did not hold in time");
    }
}

/// Polls a future this many times, whenever it is woken, then drops it: at once, or when it is
/// woken again. Returns its output, if it completed.
pub async fn polled<F: Future>(future: F, times: usize, again: bool) -> Option<F::Output> {
    let (mut future, mut left) = (pin!(future), times);
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Pending if left == 0 && !again => Poll::Ready(None),
            poll => poll.map(Some),
        }
    })
    .await
}

/// A store that works, with faults that the test sets.
pub type Faulty<A> = FaultyAdapter<A>;

pub type FaultyStore = Arc<Faulty<MemoryAdapter>>;

pub fn faulty<A>(inner: A) -> Arc<Faulty<A>> {
    Arc::new(Faulty::new(inner))
}

/// Returns a store in memory that works, with faults that the test sets.
pub fn faulty_memory() -> FaultyStore {
    faulty(MemoryAdapter::new())
}
