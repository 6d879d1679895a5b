//! Of the deliveries of one event with two identities, one runs: in several processes at once, under every ledger.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http::{Request, StatusCode};
use tower::Layer;
use tower_dedup::adapter::contract::{CallTerms, Token};
use tower_dedup::key::{self, Event, Extracted, KeyExtractor};
use tower_dedup::{DedupKey, DedupLayer};

use crate::support::ledgers::Setup;
use crate::support::{Body, Handler, by_header, dedup_key, memory, result, send};

const ROUNDS: usize = 30;
/// A task of each process sends each id.
const PROCESSES: usize = 2;

fn by_id_and_change() -> KeyExtractor {
    let change = key::header("x-change");
    key::header("webhook-id").namespace("test").second_identity("change", change)
}

fn event(id: &str, change: &str) -> Request<Body> {
    let request = Request::post("/hook").header("webhook-id", id).header("x-change", change);
    request.body(Body::from("payload")).unwrap()
}

/// Two ids report each change. Layers with connections of their own are processes that share nothing else.
async fn one_of_racing_deliveries_runs<S: Setup>(setup: S) {
    race(&setup).await;
}

/// Of each third change a row has expired: that of its second identity, or that of a key.
async fn one_of_racing_deliveries_runs_over_expired_rows<S: Setup>(setup: S) {
    let operator = setup.operator().await;
    // Makes the table.
    let service = setup.layer(by_id_and_change()).await.layer(Handler::default().service());
    send(&service, event("other", "other")).await;
    for round in (0..ROUNDS).filter(|round| round % 3 < 2) {
        let name = [("test.change", format!("change-{round}")), ("test", format!("{round}-0"))];
        let (namespace, id) = &name[round % 3];
        let keys = DedupKey::new(namespace, id).unwrap();
        let terms = CallTerms::on_claim(Token::random(), Duration::from_millis(1));
        operator.claim(&keys, &terms).await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(5)).await;
    race(&setup).await;
}

async fn race<S: Setup>(setup: &S) {
    let handler = Handler::default();
    let mut services = Vec::new();
    for _ in 0..PROCESSES {
        let layer = setup.layer(by_id_and_change()).await;
        services.push((layer.handle(), layer.layer(handler.service())));
    }
    for round in 0..ROUNDS {
        let change = format!("change-{round}");
        let tasks = (0..8).map(|task| {
            let (_, service) = &services[task % PROCESSES];
            let request = event(&format!("{round}-{}", task / PROCESSES % 2), &change);
            async move { send(service, request).await.status() }
        });
        for status in join_all(tasks).await {
            // A delivery that has waited for too long is in flight.
            assert!([StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE].contains(&status));
        }
        for id in [format!("{round}-0"), format!("{round}-1")] {
            for (_, service) in &services {
                assert_eq!(result(&send(service, event(&id, &change)).await), Some("duplicate"));
            }
        }
    }
    let mut runs = HashMap::new();
    for delivery in handler.deliveries() {
        let round = delivery.id().split_once('-').unwrap().0.to_owned();
        *runs.entry(round).or_insert(0) += 1;
    }
    assert!(runs.len() == ROUNDS && runs.values().all(|runs| *runs == 1), "{runs:?}");
    for (handle, _) in services {
        handle.drain().await;
    }
}

crate::on_ledgers!([lease_memory = OnMemory], one_of_racing_deliveries_runs,);

/// The guide's way to change a key: while both kinds of process run, the new key has the old one as its second identity.
#[tokio::test]
async fn changed_key_is_a_duplicate_for_old_and_new_processes() {
    let (store, handler) = (memory(), Handler::default());
    let new = KeyExtractor::from_fn("test-2", |request| {
        let id = request.headers()["webhook-id"].to_str().unwrap();
        let event = Event::new(DedupKey::new("test-2", &format!("new-{id}"))?);
        Ok(Extracted::Keys(event.with_second_identity(dedup_key(id)).into()))
    });
    let [old, new] = [by_header(), new]
        .map(|keys| DedupLayer::new(keys, Arc::clone(&store)).layer(handler.service()));
    for (id, first, second) in [("1", &old, &new), ("2", &new, &old)] {
        assert_eq!(result(&send(first, event(id, "")).await), None);
        assert_eq!(result(&send(second, event(id, "")).await), Some("duplicate"));
    }
}

mod shared {
    use super::{one_of_racing_deliveries_runs, one_of_racing_deliveries_runs_over_expired_rows};

    crate::on_ledgers!(
        [
            lease_sqlite = OnSqlite,
            lease_postgres = OnPostgres,
            transactional_sqlite = InSqlite,
            transactional_postgres = InPostgres,
            lease_redis = OnRedis,
        ],
        one_of_racing_deliveries_runs,
        one_of_racing_deliveries_runs_over_expired_rows,
    );
}
