//! Stored data of duplicates, in batches and in single calls of the SQL adapters.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Request, Response, StatusCode};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgConnection, PgPool, SqliteConnection};
use tower::Layer;
use tower::util::BoxCloneService;
use tower_dedup::adapter::contract::{
    ClaimReply, CompleteReply, DedupAdapter, Fetch, StoredData, StoredResponse,
};
use tower_dedup::adapter::maintenance::{ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::{DedupLayer, OnUnavailable, Replay, ResponseBody, StoreError, StoreErrorKind};

use super::queue::sqlite;
use support::postgres::Schema;
use support::{
    Body, FIRST, Handler, by_header, dedup_key, request, result, send, sqlite_url, terms,
};

/// So many keys that more than one statement reads them.
const KEYS: usize = 80;

async fn open(dir: &tempfile::TempDir) -> SqliteConnection {
    SqliteConnection::connect(&sqlite_url(dir.path())).await.unwrap()
}

fn response(id: usize) -> StoredResponse {
    StoredResponse::new(StatusCode::CREATED, HeaderMap::new(), Bytes::from(format!("body {id}")))
}

fn stored(claimed: &ClaimReply) -> Option<Arc<StoredData>> {
    match claimed {
        ClaimReply::Duplicate(seen) => seen.stored.clone(),
        other => panic!("{other:?}"),
    }
}

/// Completes keys, each with its own payload and response.
async fn complete<A: DedupAdapter>(adapter: &A) {
    for id in 0..KEYS {
        let key = dedup_key(&id.to_string());
        let payload = [u8::try_from(id).unwrap(); 32];
        let mine = terms().with_payload_sha256(payload).with_response(response(id).into());
        assert_eq!(adapter.complete(&key, &mine).await.unwrap(), CompleteReply::Inserted);
    }
}

/// Claims every key three times at once, each time with another `Fetch`.
async fn claim_all<A: DedupAdapter>(
    adapter: &A,
) -> Vec<(usize, Fetch, Result<ClaimReply, StoreError>)> {
    let fetches = [Fetch::Nothing, Fetch::Digest, Fetch::DigestAndResponse];
    let calls = (0..KEYS).flat_map(|id| fetches.map(|fetch| (id, fetch)));
    join_all(calls.map(|(id, fetch)| async move {
        let (key, mine) = (dedup_key(&id.to_string()), terms().with_fetch(fetch));
        (id, fetch, adapter.claim(&key, &mine).await)
    }))
    .await
}

/// `corrupt` makes the row of key 7 unreadable, which all callers of the row read.
async fn unreadable_row_fails_only_its_callers<A: MaintenanceAdapter>(
    adapter: &A,
    corrupt: impl AsyncFnOnce(),
) {
    complete(adapter).await;
    corrupt().await;
    for _ in 0..2 {
        for (id, fetch, claimed) in claim_all(adapter).await {
            if id == 7 {
                assert_eq!(claimed.unwrap_err().kind(), StoreErrorKind::Corrupt, "{fetch:?}");
            } else {
                assert_eq!(stored(&claimed.unwrap()).is_some(), fetch != Fetch::Nothing);
            }
        }
        let completions = (0..KEYS).map(|id| async move {
            (id, adapter.complete(&dedup_key(&id.to_string()), &terms()).await)
        });
        for (id, completed) in join_all(completions).await {
            if id == 7 {
                assert_eq!(completed.unwrap_err().kind(), StoreErrorKind::Corrupt);
            } else {
                assert_eq!(completed.unwrap(), CompleteReply::LeaseLost);
            }
        }
    }
    let listing = adapter.list(&ListFilter::default(), None, 100).await.unwrap();
    assert_eq!((listing.keys.len(), listing.unreadable), (KEYS - 1, 1));
    assert!(listing.keys.iter().all(|(key, _)| key.id() != "7"));
    let keys = ["6", "7", "8"].map(dedup_key);
    assert_eq!(adapter.get_many(&keys).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert!(adapter.get_many(&keys[..1]).await.unwrap()[0].is_some());
}

/// `corrupt` makes the response of key 7 unreadable.
async fn unreadable_response_fails_only_its_caller<A: MaintenanceAdapter>(
    adapter: &A,
    corrupt: impl AsyncFnOnce(),
) {
    complete(adapter).await;
    corrupt().await;
    for _ in 0..2 {
        for (id, fetch, claimed) in claim_all(adapter).await {
            if id == 7 && fetch == Fetch::DigestAndResponse {
                assert_eq!(claimed.unwrap_err().kind(), StoreErrorKind::Corrupt);
            } else {
                assert_eq!(stored(&claimed.unwrap()).is_some(), fetch != Fetch::Nothing);
            }
        }
    }
    // `get` returns the digest, and says that the response is unreadable.
    let entry = adapter.get(&dedup_key("7")).await.unwrap().unwrap();
    assert!(entry.response_is_unreadable);
    assert_eq!(entry.stored, Some(Arc::new(StoredData::new(Some([7; 32]), None))));
    // Of many keys, no stored data is read.
    let many = adapter.get_many(&[dedup_key("7")]).await.unwrap();
    assert!(many[0].as_ref().is_some_and(|entry| entry.stored.is_none()), "{many:?}");
}

/// SQLite stores any type in any column. All callers of a row share its reply.
#[tokio::test]
async fn column_that_does_not_decode_fails_only_the_callers_that_read_it_on_sqlite() {
    for (column, value, is_response) in [
        ("response_headers", "'none'", true),
        ("response_status", "'abc'", true),
        ("response_body", "1.5", true),
        ("attempts", "'abc'", false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let adapter = sqlite(&dir).await;
        let corrupt = async || {
            let corrupt =
                format!("UPDATE webhook_deliveries SET {column} = {value} WHERE id = '7'");
            let corrupt = sqlx::query(sqlx::AssertSqlSafe(corrupt));
            corrupt.execute(&mut open(&dir).await).await.unwrap();
        };
        if is_response {
            unreadable_response_fails_only_its_caller(&adapter, corrupt).await;
        } else {
            unreadable_row_fails_only_its_callers(&adapter, corrupt).await;
        }
    }
}

/// Makes stored responses wait for the lock 7 when they are read: the table is a view then.
async fn hold_responses(pool: &PgPool) {
    let columns = "key, version, namespace, id, token, lease_until, attempts, takeover, first_seen_at, \
         completed_at, expires_at, event_type, payload_sha256, response_status, response_headers";
    let sql = format!(
        "ALTER TABLE webhook_deliveries RENAME TO base; \
         CREATE FUNCTION held(body bytea) RETURNS bytea STABLE LANGUAGE plpgsql AS \
         'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN body; END'; \
         CREATE VIEW webhook_deliveries AS \
         SELECT {columns}, held(response_body) AS response_body FROM base"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(pool).await.unwrap();
}

#[tokio::test]
async fn postgres_new_key_is_claimed_while_duplicates_wait_for_their_responses() {
    let schema = Schema::fresh();
    let pool = PgPoolOptions::new().max_connections(1).connect(&schema.url()).await.unwrap();
    let options = PostgresOptions::new().connections(1);
    let adapter = PostgresAdapter::with_options(pool.clone(), options);
    complete(&adapter).await;
    hold_responses(&pool).await;
    // The second time, the adapter reads before it inserts.
    for round in 0..2 {
        let mut lock = PgConnection::connect(&schema.url()).await.unwrap();
        sqlx::query("SELECT pg_advisory_lock(7)").execute(&mut lock).await.unwrap();
        let duplicates: Vec<_> = (0..KEYS)
            .map(|id| {
                let adapter = adapter.clone();
                let terms = terms().with_fetch(Fetch::DigestAndResponse);
                let claim = async move {
                    adapter.claim(&dedup_key(&id.to_string()), &terms).await.unwrap()
                };
                tokio::spawn(claim)
            })
            .collect();
        let new = terms().with_fetch(Fetch::DigestAndResponse);
        let key = dedup_key(&format!("new {round}"));
        assert_eq!(adapter.claim(&key, &new).await.unwrap(), FIRST);
        assert!(duplicates.iter().all(|duplicate| !duplicate.is_finished()));
        lock.close().await.unwrap();
        for (id, duplicate) in duplicates.into_iter().enumerate() {
            let data = stored(&duplicate.await.unwrap()).unwrap();
            assert_eq!(data.response, Some(Arc::new(response(id))));
        }
    }
}

/// A layer that replays and fails open, over a store with one complete event.
async fn replays_and_fails_open<A: DedupAdapter + Clone>(
    adapter: &A,
    handler: &Handler,
) -> BoxCloneService<Request<Body>, Response<ResponseBody<Body>>, Infallible> {
    let service = DedupLayer::new(by_header(), adapter.clone())
        .replay(Replay::new())
        .on_unavailable(OnUnavailable::FailOpen)
        .store_timeout(Duration::from_millis(500))
        .layer(handler.service());
    assert_eq!(send(&service, request("known")).await.status(), 200);
    assert_eq!(result(&send(&service, request("known")).await), Some("duplicate"));
    BoxCloneService::new(service)
}

/// The store has found a duplicate: a handler must not run, whatever becomes of its response.
#[tokio::test]
async fn postgres_response_that_is_slow_or_fails_is_503_even_if_the_layer_fails_open() {
    let (schema, handler) = (Schema::fresh(), Handler::default());
    let pool = PgPoolOptions::new().max_connections(2).connect(&schema.url()).await.unwrap();
    let adapter = PostgresAdapter::new(pool.clone());
    let service = replays_and_fails_open(&adapter, &handler).await;

    hold_responses(&pool).await;
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    sqlx::query("SELECT pg_advisory_lock(7)").execute(&mut connection).await.unwrap();
    assert_eq!(send(&service, request("known")).await.status(), 503);
    assert_eq!(result(&send(&service, request("known")).await), Some("unavailable"));
    sqlx::query("SELECT pg_advisory_unlock(7)").execute(&mut connection).await.unwrap();
    let rename = "ALTER VIEW webhook_deliveries RENAME COLUMN response_body TO renamed";
    sqlx::query(rename).execute(&mut connection).await.unwrap();
    assert_eq!(send(&service, request("known")).await.status(), 503);
    assert_eq!(handler.runs(), 1);
    // A store that has not found a duplicate fails open.
    sqlx::query("DROP VIEW webhook_deliveries").execute(&mut connection).await.unwrap();
    sqlx::query("CREATE VIEW webhook_deliveries AS SELECT 1 AS key")
        .execute(&mut connection)
        .await
        .unwrap();
    assert_eq!(send(&service, request("known")).await.status(), 200);
    assert_eq!(handler.runs(), 2);
}
