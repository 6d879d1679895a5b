//! What a redelivery meets on its way to its layer.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower_dedup_inbox::Parked;

use crate::world::{Place, World, on_each, request, send, stored};

on_each! {
    handler_without_the_inbox_is_awaited_and_not_polled_without_end
}

async fn handler_without_the_inbox_is_awaited_and_not_polled_without_end(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    assert_eq!(send(&world.router(), request("a", "1")).await, stored());
    let polls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&polls);
    let without = tower::service_fn(move |request: Request<http_body_util::Full<bytes::Bytes>>| {
        // With its mark.
        drop(request);
        let polls = Arc::clone(&counted);
        async move {
            let mut handler = pin!(tokio::time::sleep(Duration::from_millis(500)));
            std::future::poll_fn(|cx| {
                polls.fetch_add(1, Ordering::Relaxed);
                handler.as_mut().poll(cx)
            })
            .await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
        }
    });
    let running = world.start(without);
    assert_eq!(world.until_parked().await, [Parked::Misrouted]);
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls < 100, "{polls} polls of a handler that sleeps once");
    drop(running);
}
