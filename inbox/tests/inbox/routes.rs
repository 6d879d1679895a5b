//! How a redelivery finds its route, its layer, and its process.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower_dedup::{Mode, key};
use tower_dedup_inbox::{Inbox, Parked, Selection};

use crate::world::{Place, SHORT, World, on_each, on_event, one, request, send, stored};

on_each! {
    nested_route_gets_its_original_target
    route_that_is_gone_is_tried_again_and_parked
    handler_without_the_inbox_runs_once_and_parks
    rows_wait_while_a_layer_of_their_namespace_is_off
    layer_that_is_switched_under_a_redelivery_calls_nothing
    rows_of_others_are_left_alone
    rolling_deploy_runs_each_event_once
}

async fn nested_route_gets_its_original_target(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    let route = || post(on_event).layer(world.inbox.around(world.dedup(one())));
    let inner = Router::new().route("/{tenant}/hook", route());
    let app = Router::new().nest("/api", inner).with_state(world.app.clone());
    let mut nested = request("a", "1");
    *nested.uri_mut() = "/api/t%201/hook?x=1&y=%20".parse().unwrap();
    assert_eq!(send(&app, nested).await, stored());
    assert_eq!(world.rows().await[0].target, "/api/t%201/hook?x=1&y=%20");
    let _running = world.start(app);
    world.until_done(&["a"]).await;
    assert_eq!(world.app.seen.lock().unwrap().0, "/api/t%201/hook?x=1&y=%20");
}

async fn route_that_is_gone_is_tried_again_and_parked(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    assert_eq!(send(&world.router(), request("a", "1")).await, stored());
    let running = world.start(Router::new());
    let rows = world.until(|rows| rows[0].parked.is_some()).await;
    assert_eq!((rows[0].parked, rows[0].attempts), (Some(Parked::Misrouted), 1));
    assert!(rows[0].last.as_ref().unwrap().contains("404"), "{:?}", rows[0].last);
    drop(running);
    let _running = world.start(world.router());
    assert_eq!(world.inbox.retry(&Selection::default()).await.unwrap(), 1);
    world.until_done(&["a"]).await;
}

/// It is awaited, and not polled without end, with the mark or without.
async fn handler_without_the_inbox_runs_once_and_parks(place: Place) {
    // 503 says that no handler ran.
    for (status, runs_again) in [(200, false), (500, false), (422, false), (503, true)] {
        let world = World::new(place).await;
        world.plan([500]);
        assert_eq!(send(&world.router(), request("a", "1")).await, stored());
        let polls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&polls);
        let without = tower::service_fn(move |request: Request<Full<Bytes>>| {
            let marked = (status != 200).then_some(request);
            let polls = Arc::clone(&counted);
            async move {
                let mut handler = pin!(tokio::time::sleep(Duration::from_millis(300)));
                std::future::poll_fn(|cx| {
                    polls.fetch_add(1, Ordering::Relaxed);
                    handler.as_mut().poll(cx)
                })
                .await;
                drop(marked);
                let response = Response::builder().status(status);
                Ok::<_, Infallible>(response.body(Body::empty()).unwrap())
            }
        });
        let _running = world.start(without);
        let last = |text: &Option<String>| text.as_ref().is_some_and(|it| it.contains("misrouted"));
        let rows = world.until(|rows| last(&rows[0].last)).await;
        let parked = (!runs_again).then_some(Parked::Misrouted);
        assert_eq!(rows[0].parked, parked, "{status}");
        let polls = polls.load(Ordering::Relaxed);
        assert!(polls < 100, "{polls} polls of a handler that sleeps once");
    }
}

async fn rows_wait_while_a_layer_of_their_namespace_is_off(place: Place) {
    for mode in [Mode::Off, Mode::Shadow] {
        let world = World::new(place).await;
        world.plan([500]);
        let app = world.router();
        // The other one of two layers of the namespace.
        let other = world.dedup(one());
        let switch = other.handle();
        let _other = world.inbox.around(other);
        assert_eq!(send(&app, request("a", "1")).await, stored());
        switch.set_mode(mode);
        let _running = world.start(app.clone());
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert_eq!(world.runs().len(), 1, "{mode:?}");
        // A delivery while the first layer enforces is stored all the same.
        assert_eq!(send(&app, request("b", "1")).await, (200, None));
        switch.set_mode(Mode::Enforce);
        world.until_done(&["b", "a"]).await;
    }
}

/// A process takes the row, and its layer is switched before the redelivery reaches it.
async fn layer_that_is_switched_under_a_redelivery_calls_nothing(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    let dedup = world.dedup(one());
    let switch = dedup.handle();
    let app = world.router_of(dedup);
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let off = switch.clone();
    let switching =
        app.clone().layer(axum::middleware::map_request(move |request: axum::extract::Request| {
            off.set_mode(Mode::Off);
            async { request }
        }));
    let running = world.start(switching);
    let text = "the layer is not in the mode `Enforce`";
    let rows = world.until(|rows| rows[0].last.as_deref() == Some(text)).await;
    assert_eq!((rows[0].attempts, rows[0].parked, world.runs().len()), (1, None, 1));
    drop(running);
    switch.set_mode(Mode::Enforce);
    let _running = world.start(app);
    world.until_done(&["a"]).await;
}

async fn rows_of_others_are_left_alone(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let other = world.process(|inbox| inbox.later()).await;
    let keys = key::header("webhook-id").namespace("other");
    let others = other.router_of(other.dedup(keys));
    assert_eq!(send(&others, request("a", "1")).await, stored());
    assert_eq!(send(&world.router(), request("b", "1")).await, stored());
    // Another service of this namespace.
    world
        .sql(
            "UPDATE webhook_inbox SET service = 'other' WHERE keys LIKE '%b%'",
            "UPDATE webhook_inbox SET service = 'other' WHERE keys LIKE '%b%'",
        )
        .await;
    let running = world.start(world.router());
    assert_eq!(send(&world.router(), request("c", "1")).await, stored());
    world.until(|rows| rows.len() == 2).await;
    assert_eq!(world.effects().await, ["c"]);
    drop(running);
    let _running = other.start(others);
    world.until(|rows| rows.len() == 1).await;
    assert_eq!(world.effects().await, ["c", "a"]);
}

/// Two versions of the application, which read other ids.
async fn rolling_deploy_runs_each_event_once(place: Place) {
    // Both take it, as often as they come first.
    let set = |inbox: Inbox| inbox.later().delays([SHORT; 20]);
    let world = World::with(place, set).await;
    let next = world.process(set).await;
    let old = world.router();
    let new = next.router_of(next.dedup(key::header("other-id").namespace("acme")));
    let mut both = request("a", "1");
    both.headers_mut().insert("other-id", "b".parse().unwrap());
    assert_eq!(send(&old, both).await, stored());
    let _new = next.start(new.clone());
    // The new version cannot run it, and calls nothing. The old one can.
    world.until(|rows| rows[0].last.as_ref().is_some_and(|it| it.contains("misrouted"))).await;
    assert_eq!(world.runs().len(), 0);
    let _old = world.start(old);
    world.until(|rows| rows.is_empty()).await;
    assert_eq!(world.effects().await, ["a"]);
}
