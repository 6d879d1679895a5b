//! Deliveries of several events: they complete in one COMMIT, or none does.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::post;
use tower::ServiceExt;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::inspect::KeyState;
use tower_dedup::{DedupKey, DedupLayer, Delivery};

use super::fixture::Db;
use crate::support::multi_event::{Fixture, by_word, cases, ids, insert, layers, own};
use crate::support::{answered, dedup_key, terms};

cases! {
    sqlite: sqlite_under(Transactional) = [
        events_complete_together, failed_delivery_releases_all
    ];
    postgres: postgres_under(Transactional) = [
        events_complete_together, failed_delivery_releases_all
    ];
}

mod late {
    use super::super::fixture::on_both;
    use super::event_completed_meanwhile_refuses_all;

    on_both!(event_completed_meanwhile_refuses_all);
}

async fn events_complete_together(fixture: Fixture) {
    assert_eq!(fixture.send("a b=twin c").await, own(200));
    assert_eq!(fixture.effects.all().await, ids("a b c"));
    // The second identity is complete, too.
    assert_eq!(fixture.send("a c").await, layers(200, "duplicate"));
    assert_eq!(fixture.send("other=twin").await, layers(200, "duplicate"));
    assert_eq!(fixture.send("c d a").await, own(200));
    assert_eq!(fixture.news(), ids("d"));
    assert_eq!(fixture.effects.all().await, ids("a b c d"));
}

async fn failed_delivery_releases_all(fixture: Fixture) {
    for words in ["a b:fail c", "a b:abort c", "a b:error c", "a b:panic c"] {
        assert_ne!(fixture.send(words).await.0, 200, "{words}");
        for id in ["a", "b", "c"] {
            assert_eq!(fixture.state(id).await, Some(KeyState::Released), "{words}: {id}");
        }
        assert!(fixture.effects.all().await.is_empty(), "{words}");
    }
    assert_eq!(fixture.send("a b c").await, own(200));
    assert_eq!(fixture.effects.all().await, ids("a b c"));
}

/// A late run elsewhere completes one of the events while the handler runs. Nothing of this run counts, and the retry runs
/// the others.
async fn event_completed_meanwhile_refuses_all<D: Db>() {
    let db = D::create().await;
    let (store, pool) = (db.adapter(), db.pool().clone());
    let handler = async move |event: Delivery| {
        if event.keys().any(|key| key.id() == "x") {
            store.complete(&dedup_key("x"), &terms()).await.unwrap();
        }
        let mut tx = event.begin(&pool).await?;
        D::run(&mut tx, insert(event.keys().map(DedupKey::id))).await?;
        tx.commit().await
    };
    let layer = DedupLayer::transactional(by_word(), db.adapter());
    let app: Router = Router::new().route("/hook", post(handler)).layer(layer);
    let deliver = || app.clone().oneshot(Request::post("/hook").body(Body::from("a x b")).unwrap());
    assert_eq!(answered(&deliver().await.unwrap()), (503, None));
    assert!(db.effects().await.is_empty());
    assert_eq!(answered(&deliver().await.unwrap()), (200, None));
    assert_eq!(db.effects().await, ["a", "b"]);
}
