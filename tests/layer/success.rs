//! Success: the status, the whole response, a `Disposition`; and handlers past their timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tower::{Layer, service_fn};
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::{DedupLayer, Disposition};

use support::ledgers::Inner;
use support::{Body, answered, by_header, dedup_key, memory as store, request, send, state};

/// A handler that answers this status with this disposition, and counts its runs.
fn disposes(runs: &Arc<AtomicUsize>, status: u16, disposition: Disposition) -> impl Inner {
    let runs = Arc::clone(runs);
    service_fn(move |_: Request<Body>| {
        runs.fetch_add(1, Ordering::SeqCst);
        let mut response = Response::new(Body::from("handled"));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        response.extensions_mut().insert(disposition);
        async move { Ok(response) }
    })
}

#[tokio::test]
async fn disposition_decides_before_success_when_and_stays_in_the_response() {
    for (status, disposition, expected) in [
        (500, Disposition::Complete, KeyState::Complete),
        (422, Disposition::Complete, KeyState::Complete),
        (200, Disposition::Release, KeyState::Released),
    ] {
        let (store, runs) = (store(), Arc::new(AtomicUsize::new(0)));
        let service = DedupLayer::new(by_header(), Arc::clone(&store))
            .success_when(move |_| disposition == Disposition::Release)
            .layer(disposes(&runs, status, disposition));
        let response = send(&service, request("a")).await;
        assert_eq!(answered(&response), (status, None));
        assert_eq!(response.extensions().get(), Some(&disposition));
        assert_eq!(state(&store, "a").await, Some(expected), "{status} {disposition:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn handler_past_its_timeout_is_dropped_answered_504_and_run_by_the_retry() {
    let (store, runs) = (store(), Arc::new(AtomicUsize::new(0)));
    let (count, held) = (Arc::clone(&runs), Arc::new(()));
    let alive = Arc::downgrade(&held);
    let layer =
        DedupLayer::new(by_header(), Arc::clone(&store)).handler_timeout(Duration::from_secs(20));
    let handle = layer.handle();
    let service = layer.layer(service_fn(move |_: Request<Body>| {
        let run = count.fetch_add(1, Ordering::SeqCst);
        let guard = (run == 0).then(|| alive.upgrade());
        async move {
            let _guard = guard;
            tokio::time::sleep(Duration::from_secs(if run == 0 { 21 } else { 19 })).await;
            Ok::<_, std::convert::Infallible>(Response::new(Body::default()))
        }
    }));
    let late = send(&service, request("a")).await;
    assert_eq!(answered(&late), (504, Some("handler-timeout")));
    assert!(!late.headers().contains_key("retry-after"));
    assert_eq!(Arc::strong_count(&held), 1, "the handler was not dropped");
    assert_eq!(handle.running(), 0);
    let entry = store.get(&dedup_key("a")).await.unwrap().unwrap();
    assert_eq!((entry.state, entry.attempts), (KeyState::Released, 1));

    let retry = send(&service, request("a")).await;
    assert_eq!(answered(&retry), (200, None));
    assert_eq!(state(&store, "a").await, Some(KeyState::Complete));
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}
