//! What operators see and do, and what the metrics are called.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use metrics_util::debugging::{DebuggingRecorder, Snapshotter};
use tower_dedup::key;
use tower_dedup_inbox::{Parked, Selection};

use crate::world::{Place, World, on_each, request, send, stored};

on_each! {
    rows_are_selected
    metrics_are_those_of_the_page
    rows_that_cannot_be_counted_are_reported
}

type Set = fn(&mut Selection);

async fn rows_are_selected(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let app = world.router();
    let other = world.router_of(world.dedup(key::header("webhook-id").namespace("other")));
    for (app, id) in [(&app, "a"), (&app, "b"), (&other, "a"), (&other, "c")] {
        assert_eq!(send(app, request(id, "12345")).await, stored());
    }
    let park = "UPDATE webhook_inbox SET due = NULL, attempts = 4, \
         parked = CASE WHEN keys LIKE '%c%' AND namespace = 'other' THEN 'died' ELSE 'failed' END \
         WHERE namespace = 'other'";
    world.sql(park, park).await;
    let of = |set: Set| {
        let mut of = Selection::default();
        set(&mut of);
        of
    };
    let cases: [(Set, usize); 9] = [
        (|_| {}, 4),
        (|it| it.seq = Some(1), 1),
        (|it| it.service = Some("shop".into()), 4),
        (|it| it.service = Some("other".into()), 0),
        (|it| it.namespace = Some("other".into()), 2),
        (|it| it.id = Some("a".into()), 2),
        (|it| it.parked = Some(None), 2),
        (|it| it.parked = Some(Some(Parked::Died)), 1),
        (|it| it.received_until = Some(SystemTime::now() - Duration::from_secs(60)), 0),
    ];
    for (n, (set, rows)) in cases.into_iter().enumerate() {
        assert_eq!(world.inbox.list(&of(set), 0, 9).await.unwrap().len(), rows, "case {n}");
    }
    let page = world.inbox.list(&Selection::default(), 1, 2).await.unwrap();
    assert_eq!(page.iter().map(|row| row.seq).collect::<Vec<_>>(), [2, 3]);
    let mut counts = world.inbox.count().await.unwrap();
    counts.sort_by_key(|it| (it.namespace.clone(), it.parked.map(Parked::as_str)));
    let shown: Vec<_> =
        counts.iter().map(|it| (it.namespace.as_str(), it.parked, it.rows)).collect();
    let died = ("other", Some(Parked::Died), 1);
    assert_eq!(shown, [("acme", None, 2), died, ("other", Some(Parked::Failed), 1)]);
    assert_eq!(counts[0].bytes, 2 * ("webhook-id: a\n12345".len() as u64));
    let (row, shown) = world.inbox.show(4).await.unwrap().unwrap();
    assert_eq!((row.method.as_str(), row.body_bytes, &shown.body[..]), ("POST", 5, &b"12345"[..]));
    assert_eq!(world.inbox.show(9).await.unwrap(), None);
    let other = of(|it| it.namespace = Some("other".into()));
    assert_eq!(world.inbox.retry(&other).await.unwrap(), 2);
    let rows = world.inbox.list(&other, 0, 9).await.unwrap();
    assert!(rows.iter().all(|row| row.parked.is_none() && row.attempts == 0));
    assert_eq!(world.inbox.delete(&other).await.unwrap(), 2);
    assert_eq!(world.rows().await.len(), 2);
}

/// Name, labels and description of each.
type Metrics = HashSet<[String; 3]>;

fn seen(snapshotter: &Snapshotter) -> Metrics {
    let all = snapshotter.snapshot().into_vec().into_iter();
    let of_the_inbox = all.filter(|(key, ..)| key.key().name().starts_with("tower_dedup_inbox"));
    of_the_inbox
        .map(|(key, _, text, _)| {
            let labels = key.key().labels().map(|label| format!("`{}`", label.key()));
            let labels = labels.collect::<Vec<_>>().join(", ");
            let text = text.as_deref().unwrap_or("no description").to_owned();
            [format!("`{}`", key.key().name()), labels, text]
        })
        .collect()
}

async fn metrics_are_those_of_the_page(place: Place) {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _guard = metrics::set_default_local_recorder(&recorder);
    tower_dedup_inbox::describe_metrics();
    let world = World::new(place).await;
    world.plan([500, 422]);
    let app = world.router();
    assert_eq!(send(&app, request("a", "1")).await, stored());
    assert_eq!(send(&app, request("b", "1")).await, (422, None));
    world.until(|rows| rows.len() == 2 && rows[1].parked.is_some()).await;
    let lost = "UPDATE webhook_inbox SET target = '/gone' WHERE parked IS NULL";
    world.sql(lost, lost).await;
    let parked = World::with(place, |inbox| inbox.later()).await;
    assert_eq!(send(&parked.router(), request("a", "1")).await, stored());
    let lapsed = "UPDATE webhook_inbox SET turn = ";
    parked.sql(&format!("{lapsed}'x'"), &format!("{lapsed}X'00'")).await;
    let _running = [world.start(app.clone()), parked.start(parked.router())];
    world.until_parked().await;
    parked.until(|rows| rows.is_empty()).await;
    let away = "ALTER TABLE webhook_inbox RENAME TO away";
    world.sql(away, away).await;
    send(&app, request("c", "1")).await;
    let rows = include_str!("../../src/metrics.md").lines().skip(2);
    let listed: Metrics = rows
        .map(|row| {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            [cells[1], cells[3], cells[4]].map(str::to_owned)
        })
        .collect();
    let missing = || listed.difference(&seen(&snapshotter)).next().cloned();
    support::until(|| missing().is_none()).await;
    assert_eq!(seen(&snapshotter), listed);
}

/// Only its gauges show a row that never ends. On SQLite, no value makes the statement fail.
async fn rows_that_cannot_be_counted_are_reported(place: Place) {
    if place == Place::Sqlite {
        return;
    }
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let world = World::with(place, |inbox| inbox.later()).await;
    assert_eq!(send(&world.router(), request("a", "1")).await, stored());
    let other = "UPDATE webhook_inbox SET service = 'other', received = 'infinity'";
    world.sql(other, "").await;
    let _running = world.start(world.router());
    let failed = |it: &[String; 3]| it[0].contains("table_failures");
    support::until(|| seen(&snapshotter).iter().any(failed)).await;
}
