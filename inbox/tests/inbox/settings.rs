//! Invalid settings, and requests that have no row.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::Request;
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{DedupLayer, OnUnavailable, Replay, key};
use tower_dedup_inbox::{Inbox, InboxError};

use crate::world::{Place, World, on_each, one, send};

on_each! {
    requests_without_a_row
    invalid_layers_are_refused
    files_and_names
}

/// The layer's own answers, and those of handlers that no key protects.
async fn requests_without_a_row(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let dedup = world.dedup(one()).body_limit(9).body_timeout(Duration::from_millis(200));
    let app = world.router_of(dedup);
    let body = |body: Body| {
        let request = Request::post("/hook").header("webhook-id", "a");
        request.body(body).unwrap()
    };
    let broken = futures_util::stream::iter([
        Ok(Bytes::from("x")),
        Err(std::io::Error::other("the client is gone")),
    ]);
    let slow = futures_util::stream::pending::<Result<Bytes, std::io::Error>>();
    let get = Request::get("/hook").header("webhook-id", "a").body(Body::empty()).unwrap();
    let without_key = Request::post("/hook").body(Body::empty()).unwrap();
    let says = |text: &str| Some(text.to_owned());
    for (request, answer) in [
        (body(Body::from("0123456789")), (413, says("too-large"))),
        (body(Body::from_stream(broken)), (400, says("broken-body"))),
        (body(Body::from_stream(slow)), (408, says("slow-body"))),
        (without_key, (400, says("invalid-key"))),
        (get, (405, None)),
    ] {
        assert_eq!(send(&app, request).await, answer);
    }
    assert_eq!((world.rows().await, world.runs().len()), (vec![], 0));
}

async fn invalid_layers_are_refused(place: Place) {
    let world = World::new(place).await;
    let (store, inbox) = (&world.store, &world.inbox);
    let lease = || DedupLayer::new(one(), store.clone()).inner_body::<Body>();
    let named = |name| VerifyLayer::from_fn(|_, _, _| Ok(())).named(name);
    let nameless = VerifyLayer::from_fn(|_, _, _| Ok(()));
    let zero = |inbox: Inbox| inbox.answer_within(Duration::ZERO);
    for (around, text) in [
        (inbox.around(lease().replay(Replay::new())), "replay"),
        (inbox.around(lease().on_unavailable(OnUnavailable::FailOpen)), "fails open"),
        (
            inbox.around(
                DedupLayer::idempotency_key(key::header("x"), store.clone()).inner_body::<Body>(),
            ),
            "",
        ),
        (inbox.around(lease()).verified_by(nameless), "a name"),
        (inbox.around(lease()).verified_by(named("outside")), "`outside`"),
        (inbox.around(lease()).verified_by(named("x").body_limit(0)), "body_limit"),
        (inbox.around(lease().body_limit(0)), "body_limit"),
        (zero(inbox.clone()).around(lease()), "answer_within"),
    ] {
        let Err(InboxError::Setting(error)) = around.checked() else { panic!("{text} is valid") };
        assert!(error.contains(text), "{error}");
    }
    drop(inbox.around(lease()).verified_by(named("x")).checked().unwrap());
    let kept = |dedup: DedupLayer<tower_dedup::ledger::Lease, Body>| {
        let around = inbox.around(dedup);
        format!("{around:?}").contains("1900800s")
    };
    // 22 days without a preset: no row outlives its key.
    assert!(kept(lease().retention(Duration::from_secs(86_400))));
}

type Set = fn(Inbox) -> Inbox;

async fn files_and_names(place: Place) {
    let inbox = |set: Set| async move {
        let world = World::new(place).await;
        let error = set(world.inbox.clone()).checked().err().map(|it| it.to_string());
        error.unwrap_or_default()
    };
    let cases: [(Set, &str); 9] = [
        (|it| it.delays([]), "`delays`"),
        (|it| it.delays([Duration::from_secs(15 * 86_400)]), "`delays`"),
        (|it| it.slots(0), "`slots`"),
        (|it| it.slots(10_001), "`slots`"),
        (|it| it.turn(Duration::from_millis(10)), "`turn`"),
        (|it| it.max_waiting(0), "`max_waiting`"),
        (|it| it.table("a-b"), "`table`"),
        (|it| it.table("a.b.c"), "`table`"),
        (|it| it.table("x1").slots(1), ""),
    ];
    for (set, text) in cases {
        assert!(inbox(set).await.starts_with(text), "{text}");
    }
    for name in ["order", "public.Other_1"] {
        let world = World::with(place, |inbox| inbox.table(name)).await;
        drop(world.inbox.count().await.unwrap());
    }
    if place == Place::Postgres {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys.db");
    let url = format!("sqlite://{}?mode=rwc", file.display());
    let pool = sqlx::SqlitePool::connect(&url).await.unwrap();
    tower_dedup::adapter::SqliteAdapter::new(pool).migrate().await.unwrap();
    let error = Inbox::sqlite(&file, "shop").migrate().await.unwrap_err();
    let InboxError::Table(error) = error else { panic!("{error}") };
    assert!(error.to_string().contains("of its own"), "{error}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let file = directory.path().join("inbox.db");
        let inbox = Inbox::sqlite(&file, "shop");
        inbox.migrate().await.unwrap();
        for name in ["inbox.db", "inbox.db-wal"] {
            let mode = std::fs::metadata(directory.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }
}
