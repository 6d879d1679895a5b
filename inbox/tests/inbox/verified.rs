//! Verification, and what is stored of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use http::Request;
use support::log::Log;
use tower_dedup::key;
use tower_dedup::verify::{Refusal, VerifyLayer};
use tower_dedup_inbox::Parked;

use crate::world::{Place, World, on_each, one, request, send, stored};

on_each! {
    redelivery_is_not_verified_again
    row_that_was_not_verified_is_verified
    redelivery_by_the_sender_verifies_its_row
    verification_outside_stores_nothing_unless_it_is_stated
    required_verification_that_is_missing_stores_nothing
    secrets_are_not_stored
}

/// A verification whose signatures are too old once the switch is off.
fn verify(name: &str) -> (VerifyLayer, Arc<AtomicBool>) {
    let accepts = Arc::new(AtomicBool::new(true));
    let switch = Arc::clone(&accepts);
    let layer = VerifyLayer::from_fn(move |_, _, _| {
        if switch.load(Ordering::SeqCst) { Ok(()) } else { Err(Refusal::OutOfTime) }
    });
    (layer.named(name), accepts)
}

fn refuse(accepts: &AtomicBool) {
    accepts.store(false, Ordering::SeqCst);
}

async fn redelivery_is_not_verified_again(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    let (by, accepts) = verify("acme");
    let dedup = world.dedup(one()).require_verified();
    let app = world.router_around(world.inbox.around(dedup).verified_by(by));
    assert_eq!(send(&app, request("a", "1")).await, stored());
    assert_eq!(world.rows().await[0].verified.as_deref(), Some("acme"));
    refuse(&accepts);
    assert_eq!(send(&app, request("b", "1")).await, (401, None));
    let _running = world.start(app);
    world.until_done(&["a"]).await;
}

/// Of before the verification, and of another one.
async fn row_that_was_not_verified_is_verified(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let (other, _) = verify("other");
    let (by, accepts) = verify("acme");
    let around = || world.inbox.around(world.dedup(one()));
    let old = [world.router_around(around()), world.router_around(around().verified_by(other))];
    for (app, id) in old.iter().zip(["a", "b"]) {
        assert_eq!(send(app, request(id, "1")).await, stored());
    }
    refuse(&accepts);
    let app = world.router_around(around().verified_by(by));
    let _running = world.start(app);
    assert_eq!(world.until_parked().await, [Parked::Misrouted; 2]);
    assert_eq!(world.runs().len(), 0);
    accepts.store(true, Ordering::SeqCst);
    assert_eq!(world.inbox.retry(&tower_dedup_inbox::Selection::default()).await.unwrap(), 2);
    world.until(|rows| rows.is_empty()).await;
    assert_eq!(world.runs().len(), 2);
}

async fn redelivery_by_the_sender_verifies_its_row(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let (by, accepts) = verify("acme");
    let old = world.router();
    assert_eq!(send(&old, request("a", "1")).await, stored());
    let app = world.router_around(world.inbox.around(world.dedup(one())).verified_by(by));
    assert_eq!(send(&app, request("a", "1")).await, stored());
    refuse(&accepts);
    let _running = world.start(app);
    world.until_done(&["a"]).await;
}

async fn verification_outside_stores_nothing_unless_it_is_stated(place: Place) {
    let (log, _guard) = Log::of_this_thread();
    let world = World::new(place).await;
    world.plan([500; 2]);
    let (by, accepts) = verify("acme");
    // A record is written once a minute and namespace.
    let keys = key::header("webhook-id").namespace(&format!("outside-{place:?}"));
    let wrong = world.router_of(world.dedup(keys)).layer(by.clone());
    assert_eq!(send(&wrong, request("a", "1")).await, (500, None));
    assert_eq!(world.rows().await, []);
    let text = "not stored: a layer outside of the inbox has verified the request";
    assert_eq!(log.all(text).len(), 1);
    let around = world.inbox.around(world.dedup(one()).require_verified()).verified_outside();
    let app = world.router_around(around);
    let public = app.clone().layer(by);
    assert_eq!(send(&public, request("a", "1")).await, stored());
    assert_eq!(world.rows().await[0].verified.as_deref(), Some("outside"));
    refuse(&accepts);
    let _running = world.start(app);
    world.until_done(&["a"]).await;
}

async fn required_verification_that_is_missing_stores_nothing(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let unverified = (500, Some("unverified".to_owned()));
    let app = world.router_of(world.dedup(one()).require_verified());
    assert_eq!(send(&app, request("a", "1")).await, unverified);
    assert_eq!(world.rows().await, []);
    // Nor does a row of before run.
    assert_eq!(send(&world.router(), request("a", "1")).await, stored());
    let _running = world.start(app);
    assert_eq!(world.until_parked().await, [Parked::Misrouted]);
    assert_eq!(world.runs().len(), 0);
}

async fn secrets_are_not_stored(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    let by = VerifyLayer::new(tower_dedup::provider::GITLAB.verifier("s3cr3t").unwrap());
    let around = world.inbox.around(world.dedup(one())).verified_by(by);
    let app = world.router_around(around);
    let mut secret = Request::post("/hook").header("webhook-id", "a").header("kept", "1");
    for name in ["authorization", "proxy-authorization", "cookie", "x-gitlab-token"] {
        secret = secret.header(name, "s3cr3t");
    }
    for name in ["connection", "te", "trailer", "keep-alive", "upgrade", "expect"] {
        secret = secret.header(name, "x");
    }
    assert_eq!(send(&app, secret.body(Body::from("1")).unwrap()).await, stored());
    let seq = world.rows().await[0].seq;
    let (_, shown) = world.inbox.show(seq).await.unwrap().unwrap();
    assert_eq!((shown.headers.as_str(), &shown.body[..]), ("webhook-id: a\nkept: 1\n", &b"1"[..]));
    let _running = world.start(app);
    world.until_done(&["a"]).await;
    let (_, headers) = world.app.seen.lock().unwrap().clone();
    assert_eq!(headers.len(), 2, "{headers:?}");
}
