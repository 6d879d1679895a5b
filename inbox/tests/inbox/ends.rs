//! What becomes of a row, and what the sender gets.

use std::time::{Duration, Instant};

use tower_dedup::{OnMismatch, key};
use tower_dedup_inbox::Parked;

use crate::world::{Place, SHORT, World, on_each, one, request, send, stored};

on_each! {
    status_that_refuses_is_the_senders
    status_that_refuses_is_a_failure_once_stored_has_left
    stored_leaves_while_the_handler_runs
    redelivery_while_the_handler_runs_asks_the_ledger_again
    one_event_twice_at_once_has_one_row
    refused_mismatch_is_parked_once_stored_has_left
    event_in_flight_elsewhere_counts_no_attempt
}

async fn status_that_refuses_is_the_senders(place: Place) {
    let world = World::new(place).await;
    let app = world.router();
    for status in [400, 405, 410, 413, 414, 415, 422] {
        world.plan([status]);
        let id = status.to_string();
        assert_eq!(send(&app, request(&id, "1")).await, (status, None));
        let rows = world.until(|rows| rows.first().is_some_and(|row| row.due.is_none())).await;
        assert_eq!((rows[0].parked, rows[0].answered), (Some(Parked::Refused), false), "{status}");
        world.inbox.delete(&tower_dedup_inbox::Selection::default()).await.unwrap();
    }
    for status in [401, 403] {
        world.plan([status]);
        assert_eq!(send(&app, request("a", "1")).await, (status, None));
        world.until_done(&[]).await;
    }
    for status in [404, 408, 409, 429, 500, 503] {
        world.plan([status]);
        assert_eq!(send(&app, request(&status.to_string(), "1")).await, stored(), "{status}");
    }
    assert_eq!(world.rows().await.len(), 6);
}

async fn status_that_refuses_is_a_failure_once_stored_has_left(place: Place) {
    let world = World::new(place).await;
    world.plan([500, 422, 401, 403]);
    let app = world.router();
    let _running = world.start(app.clone());
    assert_eq!(send(&app, request("a", "1")).await, stored());
    assert_eq!(world.until_parked().await, [Parked::Failed]);
    assert_eq!(world.runs().len(), 4);
}

async fn stored_leaves_while_the_handler_runs(place: Place) {
    let world = World::with(place, |inbox| inbox.answer_within(SHORT)).await;
    world.plan([5_500]);
    let app = world.router();
    let start = Instant::now();
    assert_eq!(send(&app, request("a", "1")).await, stored());
    assert!(start.elapsed() < Duration::from_millis(1_400), "{:?}", start.elapsed());
    let rows = world.rows().await;
    assert!(rows[0].answered && rows[0].is_running);
    // Its turn is 2 s, renewed meanwhile: no loop runs it besides.
    let _running = world.start(app);
    tokio::time::sleep(Duration::from_millis(2_900)).await;
    let rows = world.rows().await;
    assert!(rows[0].is_running && rows[0].deaths == 0, "{rows:?}");
    world.until_done(&["a"]).await;
    assert_eq!(world.runs(), ["a:5500:1"]);
}

async fn redelivery_while_the_handler_runs_asks_the_ledger_again(place: Place) {
    // Before and after the answer *stored* of the first delivery.
    for wait in [Duration::from_millis(100), Duration::from_millis(700)] {
        let world = World::with(place, |inbox| inbox.answer_within(SHORT)).await;
        world.plan([2_200]);
        let app = world.router();
        let first = tokio::spawn({
            let app = app.clone();
            async move { send(&app, request("a", "1")).await }
        });
        world.until_runs(1).await;
        tokio::time::sleep(wait).await;
        assert_eq!(send(&app, request("a", "1")).await, stored());
        assert_eq!(first.await.unwrap(), stored());
        // The deletion does not find its version: the row is due.
        let rows = world.until(|rows| rows.first().is_some_and(|row| !row.is_running)).await;
        assert_eq!((rows.len(), rows[0].parked, rows[0].attempts), (1, None, 0));
        let _running = world.start(app);
        world.until_done(&["a"]).await;
        assert_eq!(world.runs().len(), 1);
    }
}

async fn one_event_twice_at_once_has_one_row(place: Place) {
    let world = World::new(place).await;
    world.plan([422; 2]);
    let app = world.router();
    let sent = (0..9).map(|_| send(&app, request("a", "1")));
    let answers = futures_util::future::join_all(sent).await;
    assert_eq!(answers.iter().filter(|it| **it == stored()).count(), 8, "{answers:?}");
    // Somebody was told *stored*: the refusal is no end.
    let _running = world.start(app);
    world.until_done(&["a"]).await;
    assert_eq!(world.runs(), ["a:422:1", "a:422:2", "a:200:3"]);
}

async fn refused_mismatch_is_parked_once_stored_has_left(place: Place) {
    let world = World::new(place).await;
    let dedup = || world.dedup(one()).compare_payload(key::json("/x"), OnMismatch::Refuse);
    let app = world.router_of(dedup());
    let bodies = [r#"{"x":1}"#, r#"{"x":2}"#];
    assert_eq!(send(&app, request("a", bodies[0])).await, (200, None));
    let answer = send(&app, request("a", bodies[1])).await;
    assert_eq!(answer, (422, Some("mismatch".to_owned())));
    world.until_done(&["a"]).await;
    let later = world.process(|inbox| inbox.later()).await;
    let late = later.router_of(dedup());
    assert_eq!(send(&late, request("a", bodies[1])).await, stored());
    let _running = later.start(late);
    assert_eq!(world.until_parked().await, [Parked::Mismatch]);
    assert_eq!(world.effects().await, ["a"]);
}

async fn event_in_flight_elsewhere_counts_no_attempt(place: Place) {
    let world = World::new(place).await;
    world.plan([3_500]);
    let app = world.router();
    let (first, second) = tokio::join!(send(&app, request("a", "1")), async {
        world.until_runs(1).await;
        let second = send(&app, request("a", "2")).await;
        let rows = world.rows().await;
        assert!(rows.iter().any(|it| !it.is_running && it.attempts == 0 && it.answered));
        second
    });
    assert_eq!((first, second), ((200, None), stored()));
    let _running = world.start(app);
    world.until_done(&["a"]).await;
    assert_eq!(world.runs().len(), 1);
}
