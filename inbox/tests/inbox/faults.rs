//! Ways to lose, double or block an event.

use crate::world::{Place, World, each, on_each, one, request, send, stored};
use tower_dedup_inbox::Parked;

on_each! {
    delivery_that_succeeds_leaves_no_row
    failure_runs_again_without_the_sender
    last_failure_parks
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
    world.plan([500, 0, 299]);
    let app = world.router();
    let running = world.start(app.clone());
    assert_eq!(send(&app, request("a", "1")).await, stored());
    world.until_done(&["a"]).await;
    assert_eq!(world.runs(), ["a:500:1", "a:0:2", "a:299:3", "a:200:4"]);
    drop(running);
}

async fn last_failure_parks(place: Place) {
    let world = World::new(place).await;
    world.plan([500; 9]);
    let app = world.router();
    let running = world.start(app.clone());
    assert_eq!(send(&app, request("a", "1")).await, stored());
    assert_eq!(world.until_parked().await, [Parked::Failed]);
    assert_eq!(world.runs().len(), 4);
    drop((running, each(), one()));
}
