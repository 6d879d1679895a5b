//! Responses that are stored for duplicates: with the commit, or after it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use sqlx::Pool;
use tokio::sync::Notify;
use tower::ServiceExt;
use tower_dedup::adapter::contract::{DedupAdapter, StoredResponse};
use tower_dedup::ledger::Ledger;
use tower_dedup::{CommitError, DedupLayer, Delivery, Replay};

use super::fixture::{Db, on_both};
use support::places::Shared;
use support::words::{Sql, by_word};
use support::{answered, by_header, dedup_key, terms};

on_both!(
    response_of_the_handler_is_added_after_the_commit,
    response_that_the_handler_sets_is_stored_as_its_own,
    response_that_is_set_after_the_commit_does_not_count,
    event_whose_response_is_not_stored_is_complete_at_once,
    event_that_awaits_its_response_is_in_flight,
    event_is_in_flight_for_as_long_as_its_handler_makes_its_response,
);

/// Commits, and answers with its body. With the header `sets`, it sets another response before, with `sets-late` after.
/// With `waits` it then waits to be told. With `own`, the transaction is its own.
async fn handle<S: Shared>(
    State((pool, go)): State<(Pool<S::Database>, Arc<Notify>)>,
    event: Delivery,
    headers: HeaderMap,
    body: String,
) -> Result<Response, CommitError> {
    let insert = || format!("INSERT INTO effects (id) VALUES ('{}')", event.id());
    if headers.contains_key("own") {
        let mut tx = pool.begin().await?;
        S::Database::run(&mut tx, insert()).await?;
        event.complete_in(&mut *tx).await?;
        tx.commit().await?;
        return Ok(response(&headers, body));
    }
    let mut tx = event.begin(&pool).await?;
    S::Database::run(&mut tx, insert()).await?;
    let set = || {
        let mut head = HeaderMap::new();
        for (name, value) in [("content-type", "text/xml"), ("set-cookie", "a=b"), ("x-other", "c")]
        {
            head.insert(name, value.parse().unwrap());
        }
        event.set_response(StoredResponse::new(StatusCode::ACCEPTED, head, "set \u{e9}".into()));
    };
    if headers.contains_key("sets") {
        set();
    }
    tx.commit().await?;
    if headers.contains_key("sets-late") {
        set();
    }
    if headers.contains_key("waits") {
        go.notified().await;
    }
    Ok(response(&headers, body))
}

/// Returns the response of the handler: with `ends`, one that is not stored.
fn response(headers: &HeaderMap, body: String) -> Response {
    let ends = headers.get("ends").map(|ends| ends.to_str().unwrap());
    let is_broken = || futures_util::stream::iter([Err::<Bytes, _>(io::Error::other("broken"))]);
    match ends {
        None => (StatusCode::CREATED, body).into_response(),
        Some("large") => vec![b'x'; 100_000].into_response(),
        Some("stream") => ([("content-type", "text/event-stream")], body).into_response(),
        Some("encoded") => ([("content-encoding", "gzip")], body).into_response(),
        Some("fails") => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Some("breaks") => Body::from_stream(is_broken()).into_response(),
        Some(other) => panic!("{other}"),
    }
}

fn replaying<S: Shared>(db: &Db<S>) -> Router {
    router(db, Duration::from_secs(60), Arc::default())
}

fn router<S: Shared>(db: &Db<S>, lease: Duration, go: Arc<Notify>) -> Router {
    let layer = DedupLayer::transactional(by_header(), db.adapter());
    over(db, layer.replay(Replay::new()), lease, go)
}

fn over<S: Shared>(
    db: &Db<S>,
    layer: DedupLayer<impl Ledger>,
    lease: Duration,
    go: Arc<Notify>,
) -> Router {
    let layer = layer.wait(Duration::ZERO).lease(lease);
    // A busy machine must not cause a 503.
    let layer = layer.store_timeout(Duration::from_secs(20));
    let state = (db.pool.clone(), go);
    Router::new().route("/hook", post(handle::<S>)).layer(layer).with_state(state)
}

async fn deliver(app: &Router, does: &'static str) -> (u16, String) {
    let request = Request::post("/hook").header("webhook-id", "a").header(does, "");
    let response = app.clone().oneshot(request.body(Body::from("made")).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    (
        status,
        String::from_utf8(to_bytes(response.into_body(), 1_000).await.unwrap().to_vec()).unwrap(),
    )
}

async fn response_of_the_handler_is_added_after_the_commit<S: Shared>() {
    let db = Db::<S>::create().await;
    let app = replaying(&db);
    for _ in 0..2 {
        assert_eq!(deliver(&app, "commits").await, (201, "made".to_owned()));
    }
    assert_eq!(db.effects().await, ["a"]);
}

/// As a response of the handler: with the headers that the layer stores, and for the only event of its delivery.
async fn response_that_the_handler_sets_is_stored_as_its_own<S: Shared>() {
    let db = Db::<S>::create().await;
    let app = replaying(&db);
    assert_eq!(deliver(&app, "sets").await, (201, "made".to_owned()));
    assert_eq!(deliver(&app, "sets").await, (202, "set \u{e9}".to_owned()));
    assert_eq!(db.effects().await, ["a"]);
    let again = Request::post("/hook").header("webhook-id", "a").body(Body::empty()).unwrap();
    let again = app.oneshot(again).await.unwrap();
    let has = |name| again.headers().contains_key(name);
    assert_eq!(["content-type", "set-cookie", "x-other"].map(has), [true, false, false]);

    let layer = DedupLayer::transactional(by_word(), db.adapter());
    let app = over(&db, layer.replay(Replay::new()), Duration::from_secs(60), Arc::default());
    for (events, expected) in [("b c", (201, "b c")), ("b", (200, "")), ("d", (201, "d"))] {
        let request = Request::post("/hook").header("sets", "").body(Body::from(events));
        let response = app.clone().oneshot(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1_000).await.unwrap();
        assert_eq!((status, &*body), (expected.0, expected.1.as_bytes()), "{events}");
    }
}

async fn response_that_is_set_after_the_commit_does_not_count<S: Shared>() {
    let db = Db::<S>::create().await;
    let app = replaying(&db);
    for _ in 0..2 {
        assert_eq!(deliver(&app, "sets-late").await, (201, "made".to_owned()));
    }
}

/// Its duplicates wait for no response, whoever has written the completion, and however the handler ended after it.
async fn event_whose_response_is_not_stored_is_complete_at_once<S: Shared>() {
    let db = Db::<S>::create().await;
    let lease = Duration::from_secs(60);
    let strict = router(&db, lease, Arc::default());
    let leased = DedupLayer::new(by_header(), db.adapter()).replay(Replay::new());
    let leased = over(&db, leased, lease, Arc::default());
    let mut effects = 0;
    for (ledger, app) in [("strict", strict), ("leased", leased)] {
        for ends in ["large", "stream", "encoded", "fails", "breaks"] {
            for driver in ["crate", "own"] {
                let id = format!("{ledger} {ends} {driver}");
                let request = || {
                    let request = Request::post("/hook").header("webhook-id", &id);
                    let request = request.header(driver, "").header("ends", ends);
                    app.clone().oneshot(request.body(Body::from("made")).unwrap())
                };
                let first = request().await.unwrap();
                let expected = if ["fails", "breaks"].contains(&ends) { 500 } else { 200 };
                assert_eq!(first.status(), expected, "{id}");
                drop(to_bytes(first.into_body(), 200_000).await);
                let again = request().await.unwrap();
                assert_eq!(answered(&again), (200, Some("duplicate")), "{id}");
                effects += 1;
            }
        }
    }
    assert_eq!(db.effects().await.len(), effects);
}

/// Nobody has died, so no repetition gets an answer without the response.
async fn event_is_in_flight_for_as_long_as_its_handler_makes_its_response<S: Shared>() {
    let (db, go) = (Db::<S>::create().await, Arc::new(Notify::new()));
    // A claim whose reply comes after its lease is a 503.
    let lease = Duration::from_secs(1);
    let app = router(&db, lease, go.clone());
    let first = tokio::spawn({
        let app = app.clone();
        async move { deliver(&app, "waits").await }
    });
    while db.effects().await.is_empty() {
        assert!(!first.is_finished(), "{:?}", first.await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(2 * lease).await;
    assert_eq!(deliver(&app, "commits").await.0, 503);
    go.notify_one();
    for made in [first.await.unwrap(), deliver(&app, "commits").await] {
        assert_eq!(made, (201, "made".to_owned()));
    }
}

/// A process dies between its commit and the response: for a lease the event is in flight for a layer that stores
/// responses, and a duplicate for others. The lease of its claim may be over.
async fn event_that_awaits_its_response_is_in_flight<S: Shared>() {
    let db = Db::<S>::create().await;
    let (adapter, key) = (db.adapter(), dedup_key("a"));
    let mine = terms().with_fetch(tower_dedup::adapter::contract::Fetch::DigestAndResponse);
    adapter.claim(&key, &mine).await.unwrap();
    db.advance(Duration::from_secs(61)).await;
    let completion = adapter.completion(&[(&key, &mine)]).unwrap();
    let completion = completion.as_first_statement();
    let (sql, parameter) = (completion.sql().to_owned(), completion.parameter().to_owned());
    let mut connection = db.pool.acquire().await.unwrap();
    S::Database::execute(&mut connection, sql, Some(parameter)).await.unwrap();
    let app = replaying(&db);
    let in_flight = async |app: &Router| -> Response {
        let request = Request::post("/hook").header("webhook-id", "a").body(Body::empty());
        app.clone().oneshot(request.unwrap()).await.unwrap()
    };
    assert_eq!(answered(&in_flight(&app).await), (503, Some("in-flight")));
    let plain = DedupLayer::new(by_header(), db.adapter());
    let plain = Router::new().route("/hook", post(async || "again")).layer(plain);
    assert_eq!(answered(&in_flight(&plain).await), (200, Some("duplicate")));
    db.advance(Duration::from_secs(61)).await;
    assert_eq!(answered(&in_flight(&app).await), (200, Some("duplicate")));
    assert!(db.effects().await.is_empty());
}
