//! Ways to lose, double or block an event, which an inbox inside of the layer had.

use axum::Extension;
use axum::body::Body;
use axum::extract::Request as AxumRequest;
use http::Request;
use sqlx::postgres::PgPoolOptions;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::{DedupLayer, Mode, key};
use tower_dedup_inbox::Parked;

use crate::world::{Place, SHORT, World, each, on_each, one, request, send, stored};

on_each! {
    delivery_that_succeeds_leaves_no_row
    failure_runs_again_without_the_sender
    last_failure_parks_and_a_redelivery_runs_again
    regrouped_list_runs_each_event_once
    layer_that_is_off_stores_nothing
    key_store_that_is_away_costs_no_attempt
    handler_past_its_timeout_runs_again
    redelivery_that_lost_its_mark_is_parked
    redelivery_with_other_keys_is_parked
    event_that_is_forgotten_runs_again
    another_body_under_an_id_is_another_row
}

async fn delivery_that_succeeds_leaves_no_row(place: Place) {
    let world = World::new(place).await;
    let app = world.router();
    assert_eq!(send(&app, request("a", "1")).await, (200, None));
    world.until_done(&["a"]).await;
    assert_eq!(send(&app, request("a", "1")).await, (200, Some("duplicate".to_owned())));
    world.until_done(&["a"]).await;
}

async fn failure_runs_again_without_the_sender(place: Place) {
    let world = World::new(place).await;
    // A failure, a panic, and a success that has committed nothing.
    world.plan([500, 0, 299]);
    let app = world.router();
    let _running = world.start(app.clone());
    assert_eq!(send(&app, request("a", "1")).await, stored());
    world.until_done(&["a"]).await;
    assert_eq!(world.runs(), ["a:500:1", "a:0:2", "a:299:3", "a:200:4"]);
}

async fn last_failure_parks_and_a_redelivery_runs_again(place: Place) {
    let world = World::new(place).await;
    world.plan([500; 4]);
    let app = world.router();
    let _running = world.start(app.clone());
    assert_eq!(send(&app, request("a", "1")).await, stored());
    assert_eq!(world.until_parked().await, [Parked::Failed]);
    assert_eq!((world.runs().len(), world.rows().await[0].attempts), (4, 4));
    assert_eq!(send(&app, request("a", "1")).await, stored());
    world.until_done(&["a"]).await;
}

async fn regrouped_list_runs_each_event_once(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    let app = world.router_of(world.dedup(each()));
    assert_eq!(send(&app, request("", r#"{"e":[{"id":"A"},{"id":"B"}]}"#)).await, stored());
    let second = send(&app, request("", r#"{"e":[{"id":"A"},{"id":"C"}]}"#)).await;
    assert_eq!(second, (200, None));
    let _running = world.start(app);
    world.until_done(&["A", "C", "B"]).await;
}

async fn layer_that_is_off_stores_nothing(place: Place) {
    let world = World::new(place).await;
    for mode in [Mode::Off, Mode::Shadow] {
        world.plan([500, 500]);
        let app = world.router_of(world.dedup(one()).mode(mode));
        for _ in 0..2 {
            assert_eq!(send(&app, request("a", "1")).await, (500, None));
        }
    }
    assert_eq!(world.rows().await, []);
}

async fn key_store_that_is_away_costs_no_attempt(place: Place) {
    let world = World::new(place).await;
    let lazy = PgPoolOptions::new().acquire_timeout(SHORT);
    let away = PostgresAdapter::new(lazy.connect_lazy("postgres://x@127.0.0.1:1/x").unwrap());
    let dedup = DedupLayer::transactional(one(), away).inner_body::<Body>();
    let app = world.router_of(dedup);
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let row = &world.rows().await[0];
    assert_eq!((row.attempts, row.answered), (0, true));
    let _running = world.start(world.router());
    world.until_done(&["a"]).await;
}

async fn handler_past_its_timeout_runs_again(place: Place) {
    let world = World::new(place).await;
    world.plan([9_000]);
    let app = world.router_of(world.dedup(one()).handler_timeout(SHORT));
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let _running = world.start(app);
    world.until_done(&["a"]).await;
}

/// A layer at the top makes a new request: its extensions are gone, and with them the mark.
async fn redelivery_that_lost_its_mark_is_parked(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    let app = world.router();
    let bare = app.clone().layer(axum::middleware::map_request(|request: AxumRequest| async {
        let (head, body) = request.into_parts();
        let mut bare = Request::new(body);
        *bare.method_mut() = head.method;
        *bare.uri_mut() = head.uri;
        *bare.headers_mut() = head.headers;
        drop(head.extensions);
        // The loop must not spin while no report can come.
        tokio::time::sleep(SHORT).await;
        bare
    }));
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let _running = world.start(bare);
    assert_eq!(world.until_parked().await, [Parked::Misrouted]);
    assert_eq!(world.runs().len(), 1);
}

/// The namespace comes from an extension that the redelivery lacks.
async fn redelivery_with_other_keys_is_parked(place: Place) {
    #[derive(Clone)]
    struct Tenant(&'static str);
    let world = World::new(place).await;
    world.plan([500]);
    let tenant = |request: &key::RequestRef<'_>| {
        let tenant = request.extensions().get::<Tenant>();
        Some(tenant.map_or("none", |it| it.0).to_owned())
    };
    let keys = key::header("webhook-id").namespace("acme").namespace_by(tenant);
    let inner = world.router_of(world.dedup(keys));
    let public = inner.clone().layer(Extension(Tenant("t1")));
    assert_eq!(send(&public, request("a", "1")).await, stored());
    let running = world.start(inner);
    assert_eq!(world.until_parked().await, [Parked::Misrouted]);
    assert_eq!((world.runs().len(), world.rows().await[0].attempts), (1, 1));
    drop(running);
    // An operator mends the application, and the sender comes again.
    let _running = world.start(public.clone());
    assert_eq!(send(&public, request("a", "1")).await, stored());
    world.until_done(&["a"]).await;
}

async fn event_that_is_forgotten_runs_again(place: Place) {
    use tower_dedup::adapter::maintenance::MaintenanceAdapter;
    let world = World::with(place, |inbox| inbox.later()).await;
    let app = world.router();
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let now = world.process(|inbox| inbox).await;
    assert_eq!(send(&now.router(), request("a", "2")).await, (200, None));
    let key = tower_dedup::DedupKey::new("acme", "a").unwrap();
    world.store.forget(&key).await.unwrap();
    let rows = world.until(|rows| rows.len() == 1).await;
    assert_eq!(rows[0].keys, [("acme".to_owned(), "a".to_owned())]);
    let _running = world.start(app);
    world.until_done(&["a", "a"]).await;
}

async fn another_body_under_an_id_is_another_row(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let app = world.router();
    for body in ["1", "2", "1"] {
        assert_eq!(send(&app, request("a", body)).await, stored());
    }
    // A header that differs by attempt makes no row of its own; another one does.
    for (name, value) in [("webhook-timestamp", "7"), ("content-type", "text/csv")] {
        let mut again = request("a", "1");
        again.headers_mut().insert(name, value.parse().unwrap());
        assert_eq!(send(&app, again).await, stored());
    }
    assert_eq!(world.rows().await.len(), 3);
    let _running = world.start(app);
    world.until_done(&["a"]).await;
    assert_eq!(world.runs(), ["a:200:1"]);
}
