//! Clients that hang up, processes that die and stop, and two processes at the same rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use tokio::runtime::Builder;
use tower_dedup_inbox::{Inbox, Parked, Selection};

use crate::world::{Place, SHORT, World, on_each, request, send, stored};

on_each! {
    client_that_hangs_up_stops_no_delivery
    row_of_a_dead_process_runs_and_parks_at_last
    reply_that_was_lost_lapses
    stop_waits_for_runs_and_gives_back_the_rest
    drain_waits_for_deliveries
    two_processes_run_each_event_once
    processes_that_start_at_once_make_one_table
}

async fn client_that_hangs_up_stops_no_delivery(place: Place) {
    let world = World::new(place).await;
    world.plan([500, 1_400, 500]);
    let app = world.router();
    let mut ids = Vec::new();
    for wait in [0_u64, 1, 2, 4, 8, 16, 50, 200] {
        let id = format!("e{wait}");
        let hung_up =
            tokio::time::timeout(Duration::from_millis(wait), send(&app, request(&id, "1")));
        drop(hung_up.await);
        ids.push(id);
    }
    world.inbox.drain().await;
    let _running = world.start(app);
    world.until(|rows| rows.is_empty()).await;
    let mut effects = world.effects().await;
    effects.sort();
    // The first may have been dropped before the inbox had it.
    let missing: Vec<_> = ids.iter().filter(|id| !effects.contains(*id)).collect();
    assert!(missing.is_empty() || missing == ["e0"], "{missing:?}");
    effects.dedup();
    assert_eq!(effects.len() + missing.len(), ids.len());
}

/// Runs a delivery in a process of its own, which dies in the handler.
async fn die_in_the_handler(world: &World, id: &'static str) {
    let earlier = world.runs().len();
    world.plan([60_000]);
    let process = world.process(|inbox| inbox);
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.spawn(async move {
        let process = process.await;
        send(&process.router(), request(id, "1")).await
    });
    world.until_runs(earlier + 1).await;
    runtime.shutdown_background();
}

async fn row_of_a_dead_process_runs_and_parks_at_last(place: Place) {
    let world = World::new(place).await;
    die_in_the_handler(&world, "a").await;
    let row = &world.rows().await[0];
    assert!(row.is_running && !row.answered);
    let running = world.start(world.router());
    let rows = world.until(|rows| rows[0].deaths == 1).await;
    assert_eq!((rows[0].attempts, rows[0].is_running), (1, false));
    world.until_done(&["a"]).await;
    drop(running);
    die_in_the_handler(&world, "b").await;
    let last = "UPDATE webhook_inbox SET attempts = 3";
    world.sql(last, last).await;
    let _running = world.start(world.router());
    assert_eq!(world.until_parked().await, [Parked::Died]);
}

/// A take or an insertion whose reply was lost is nobody's: it is not renewed.
async fn reply_that_was_lost_lapses(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let app = world.router();
    assert_eq!(send(&app, request("a", "1")).await, stored());
    world
        .sql(
            "UPDATE webhook_inbox SET turn = 'x', due = now() + interval '1 second'",
            "UPDATE webhook_inbox SET turn = X'00', due = unixepoch('subsec') * 1000 + 1000",
        )
        .await;
    let _running = world.start(app);
    world.until(|rows| rows[0].deaths == 1).await;
    world.until_done(&["a"]).await;
}

async fn stop_waits_for_runs_and_gives_back_the_rest(place: Place) {
    let world = World::with(place, |inbox| inbox.later().slots(1)).await;
    world.plan([2_200]);
    let app = world.router();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(world.inbox.run(app.clone(), async { drop(stopped.await) }));
    for id in ["a", "b"] {
        assert_eq!(send(&app, request(id, "1")).await, stored());
    }
    world.until_runs(1).await;
    stop.send(()).unwrap();
    running.await.unwrap();
    // The deletion of the first was written before the loop ended.
    let rows = world.rows().await;
    assert_eq!((rows.len(), world.runs().len()), (1, 1));
    assert!(!rows[0].is_running && rows[0].attempts == 0, "{rows:?}");
    // Stopped during a take: what it has taken is due again.
    let taken = tokio::spawn(world.inbox.run(app, async {}));
    taken.await.unwrap();
    let rows = world.rows().await;
    assert!(!rows[0].is_running && rows[0].attempts == 0, "{rows:?}");
    assert_eq!(world.runs().len(), 1);
}

async fn drain_waits_for_deliveries(place: Place) {
    let world = World::with(place, |inbox| inbox.answer_within(SHORT)).await;
    world.plan([1_900]);
    let app = world.router();
    assert_eq!(send(&app, request("a", "1")).await, stored());
    world.inbox.drain().await;
    assert_eq!((world.effects().await, world.rows().await), (vec!["a".to_owned()], vec![]));
}

/// Four connections at the same rows: deliveries, redeliveries, failures, takes, and operators.
async fn two_processes_run_each_event_once(place: Place) {
    const EVENTS: usize = 60;
    let world = World::with(place, |inbox| inbox.slots(8)).await;
    let other = world.process(|inbox| inbox.slots(8)).await;
    let apps: [Router; 2] = [world.router(), other.router()];
    world.plan((0..EVENTS).map(|n| if n % 3 == 0 { 500 } else { 200 }));
    let _running = [world.start(apps[0].clone()), other.start(apps[1].clone())];
    let acknowledged = Arc::new(AtomicUsize::new(0));
    let senders = (0..8).map(|sender| {
        let (apps, acknowledged) = (apps.clone(), Arc::clone(&acknowledged));
        tokio::spawn(async move {
            for n in 0..EVENTS {
                let id = format!("e{}", (n + sender * 7) % EVENTS);
                let answer = send(&apps[(n + sender) % 2], request(&id, "1")).await;
                acknowledged.fetch_add(usize::from(answer.0 == 200), Ordering::SeqCst);
            }
        })
    });
    for sender in senders.collect::<Vec<_>>() {
        while !sender.is_finished() {
            // The lock of a busy file may be late, and then the operator repeats it.
            drop(world.inbox.retry(&Selection::default()).await);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        sender.await.unwrap();
    }
    world.until(|rows| rows.is_empty()).await;
    let mut effects = world.effects().await;
    effects.sort();
    let total = effects.len();
    effects.dedup();
    assert_eq!((total, effects.len()), (EVENTS, EVENTS));
    assert!(acknowledged.load(Ordering::SeqCst) >= 7 * EVENTS);
}

async fn processes_that_start_at_once_make_one_table(place: Place) {
    for n in 0..3 {
        let name = format!("inbox_{n}");
        let world = World::new(place).await;
        let processes = (0..8).map(|_| world.process(|inbox| inbox.table(&name)));
        let processes = futures_util::future::join_all(processes).await;
        let fresh = tempfile::tempdir().unwrap();
        let started = processes.iter().map(|process| {
            let inbox = match place {
                Place::Postgres => process.inbox.clone(),
                Place::Sqlite => Inbox::sqlite(fresh.path().join("inbox.db"), "shop"),
            };
            tokio::spawn(async move { inbox.migrate().await })
        });
        for started in started.collect::<Vec<_>>() {
            started.await.unwrap().unwrap();
        }
    }
}
