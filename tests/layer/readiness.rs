//! A delivery takes its permit and the inner service's readiness, then its claim. So does a delivery that waited for
//! another delivery of its event.

use std::future::{Ready, ready};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use tower::{Layer, Service, ServiceExt};
use tower_dedup::DedupLayer;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter};
use tower_dedup::testing::StoreCall;

use crate::hooked::{BEFORE, Hooked};
use support::{Body, answered, by_header, dedup_key, request, terms, until};

/// The calls that an inner service and a ledger saw, and their behaviour.
#[derive(Default)]
struct Stage {
    /// The number of services that are ready and were not called.
    ready: AtomicUsize,
    /// The number of services that were ready at each `begin`.
    ready_at_begin: Mutex<Vec<usize>>,
    is_full: AtomicBool,
    is_broken: AtomicBool,
}

impl Stage {
    fn begins(&self) -> usize {
        self.ready_at_begin.lock().unwrap().len()
    }
}

struct Inner {
    stage: Arc<Stage>,
    ready: bool,
}

impl Inner {
    fn give_up(&mut self) {
        if std::mem::take(&mut self.ready) {
            self.stage.ready.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Clone for Inner {
    fn clone(&self) -> Self {
        Self { stage: Arc::clone(&self.stage), ready: false }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Service<Request<Body>> for Inner {
    type Response = Response<Body>;
    type Error = &'static str;
    type Future = Ready<Result<Response<Body>, &'static str>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        let begun = self.stage.begins() > 0;
        if begun && self.stage.is_broken.load(Ordering::SeqCst) {
            return Poll::Ready(Err("the inner service is broken"));
        }
        if begun && self.stage.is_full.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        if !std::mem::replace(&mut self.ready, true) {
            self.stage.ready.fetch_add(1, Ordering::SeqCst);
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(self.ready, "called without `poll_ready`");
        self.give_up();
        ready(Ok(Response::default()))
    }
}

/// The terms of another claim, which holds the key until the test releases it.
static HELD: LazyLock<CallTerms> = LazyLock::new(terms);

async fn staged(
    wait: Duration,
) -> (
    Arc<Stage>,
    Arc<Hooked>,
    impl Service<
        Request<Body>,
        Response = Response<tower_dedup::ResponseBody<Body>>,
        Error = &'static str,
        Future: Send,
    > + Send,
) {
    let stage = Arc::new(Stage::default());
    let seen = Arc::clone(&stage);
    let store = Hooked::default().on(BEFORE, StoreCall::Claim, move |_, _| {
        seen.ready_at_begin.lock().unwrap().push(seen.ready.load(Ordering::SeqCst));
        async { Ok(()) }
    });
    store.store.claim(&dedup_key("a"), &HELD).await.unwrap();
    let store = Arc::new(store);
    let layer = DedupLayer::new(by_header(), Arc::clone(&store));
    let inner = Inner { stage: Arc::clone(&stage), ready: false };
    (stage, store, layer.wait(wait).layer(inner))
}

#[tokio::test(start_paused = true)]
async fn waiting_delivery_is_ready_before_each_claim_and_returns_readiness_in_between() {
    let (stage, store, service) = staged(Duration::from_secs(60)).await;
    let delivery = tokio::spawn(service.oneshot(request("a")));
    until(|| stage.begins() > 2 && stage.ready.load(Ordering::SeqCst) == 0).await;
    store.store.release(&dedup_key("a"), &HELD).await.unwrap();
    assert_eq!(delivery.await.unwrap().unwrap().status(), 200);
    let ready_at_begin = stage.ready_at_begin.lock().unwrap().clone();
    assert!(ready_at_begin.iter().all(|ready| *ready == 1), "{ready_at_begin:?}");
    assert_eq!(stage.ready.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn waiting_delivery_whose_inner_service_stays_unready_is_503_and_claims_nothing() {
    let (stage, _, service) = staged(Duration::from_millis(50)).await;
    stage.is_full.store(true, Ordering::SeqCst);
    let refused = service.oneshot(request("a")).await.unwrap();
    assert_eq!(answered(&refused), (503, Some("unavailable")));
    assert_eq!(stage.begins(), 1);
}

#[tokio::test]
async fn waiting_delivery_whose_inner_service_fails_returns_its_error_and_claims_nothing() {
    let (stage, _, service) = staged(Duration::from_secs(60)).await;
    stage.is_broken.store(true, Ordering::SeqCst);
    let error = service.oneshot(request("a")).await.unwrap_err();
    assert_eq!(error, "the inner service is broken");
    assert_eq!(stage.begins(), 1);
}
