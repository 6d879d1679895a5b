//! Stored data of duplicates, in batches and in single calls of the SQL adapters.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, StatusCode};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};
use tower_dedup::adapter::{
    Batching, CallTerms, Claimed, Completed, DedupAdapter, Fetch, MaintenanceAdapter,
    PostgresAdapter, PostgresOptions, SqliteAdapter, SqliteOptions, StoredData, StoredResponse,
    Token,
};
use tower_dedup::{Error, ErrorKind};

use crate::support::dedup_key;
use crate::support::postgres::Schema;

/// So many keys that more than one statement reads them.
const KEYS: usize = 80;

fn terms() -> CallTerms {
    let (hour, minute) = (Duration::from_secs(3_600), Duration::from_secs(60));
    CallTerms::on_completion(Token::random(), hour, minute)
}

fn response(id: usize) -> StoredResponse {
    StoredResponse::new(StatusCode::CREATED, HeaderMap::new(), Bytes::from(format!("body {id}")))
}

fn stored(claimed: &Claimed) -> Option<Arc<StoredData>> {
    match claimed {
        Claimed::Duplicate(seen) => seen.stored.clone(),
        other => panic!("{other:?}"),
    }
}

/// Completes keys, each with its own payload and response.
async fn complete<A: DedupAdapter>(adapter: &A) {
    for id in 0..KEYS {
        let key = dedup_key(&id.to_string());
        let payload = (key.clone(), [u8::try_from(id).unwrap(); 32]);
        let mine = terms().with_payloads([payload]).with_response(response(id).into());
        assert_eq!(adapter.complete(&[key], &mine).await.unwrap(), [Completed::Inserted]);
    }
}

/// Claims every key three times at once, each time with another `Fetch`.
async fn claim_all<A: DedupAdapter>(adapter: &A) -> Vec<(usize, Fetch, Result<Claimed, Error>)> {
    let fetches = [Fetch::Nothing, Fetch::Digest, Fetch::DigestAndResponse];
    let calls = (0..KEYS).flat_map(|id| fetches.map(|fetch| (id, fetch)));
    join_all(calls.map(|(id, fetch)| async move {
        let (key, mine) = ([dedup_key(&id.to_string())], terms().with_fetch(fetch));
        (id, fetch, adapter.claim(&key, &mine).await.map(|mut claimed| claimed.remove(0)))
    }))
    .await
}

async fn each_caller_gets_the_data_it_asked_for<A: DedupAdapter>(adapter: &A) {
    complete(adapter).await;
    // The second time, the adapter reads before it inserts.
    for _ in 0..2 {
        for (id, fetch, claimed) in claim_all(adapter).await {
            let payload = Some([u8::try_from(id).unwrap(); 32]);
            let expected = match fetch {
                Fetch::Nothing => None,
                Fetch::Digest => Some(StoredData::new(payload, None)),
                _ => Some(StoredData::new(payload, Some(response(id).into()))),
            };
            assert_eq!(stored(&claimed.unwrap()), expected.map(Arc::new), "{id} {fetch:?}");
        }
    }
    // One call for all keys reads as much.
    let mut keys: Vec<_> = (0..KEYS).map(|id| dedup_key(&id.to_string())).collect();
    keys.sort();
    let all = terms().with_fetch(Fetch::DigestAndResponse);
    for (key, claimed) in keys.iter().zip(adapter.claim(&keys, &all).await.unwrap()) {
        let data = stored(&claimed).unwrap();
        let body = format!("body {}", key.id());
        assert_eq!(data.response.as_deref().unwrap().body, body);
    }
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
                assert_eq!(claimed.unwrap_err().kind(), ErrorKind::Corrupt);
            } else {
                assert_eq!(stored(&claimed.unwrap()).is_some(), fetch != Fetch::Nothing);
            }
        }
    }
    // `get` returns the digest, and says that the response is unreadable.
    let entry = adapter.get(&dedup_key("7")).await.unwrap().unwrap();
    assert!(entry.response_is_unreadable);
    assert_eq!(entry.stored, Some(Arc::new(StoredData::new(Some([7; 32]), None))));
}

const CORRUPT: &str = "UPDATE webhook_deliveries SET response_headers = 'none' WHERE id = '7'";

#[tokio::test]
async fn postgres_duplicates_carry_the_data_that_their_callers_asked_for() {
    for batching in [Batching::new(), Batching::off()] {
        let schema = Schema::fresh();
        let options = PostgresOptions::new().batching(batching);
        let adapter = PostgresAdapter::connect_with(&schema.url(), options).await.unwrap();
        each_caller_gets_the_data_it_asked_for(&adapter).await;
    }
}

#[tokio::test]
async fn sqlite_duplicates_carry_the_data_that_their_callers_asked_for() {
    for batching in [Batching::new(), Batching::off()] {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
        let options = SqliteOptions::new().batching(batching);
        let adapter = SqliteAdapter::connect_with(&url, options).await.unwrap();
        each_caller_gets_the_data_it_asked_for(&adapter).await;
    }
}

#[tokio::test]
async fn postgres_unreadable_response_fails_only_its_caller() {
    for batching in [Batching::new(), Batching::off()] {
        let schema = Schema::fresh();
        let options = PostgresOptions::new().batching(batching);
        let adapter = PostgresAdapter::connect_with(&schema.url(), options).await.unwrap();
        let corrupt = async || {
            let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
            sqlx::query(CORRUPT).execute(&mut connection).await.unwrap();
        };
        unreadable_response_fails_only_its_caller(&adapter, corrupt).await;
    }
}

#[tokio::test]
async fn sqlite_unreadable_response_fails_only_its_caller() {
    for batching in [Batching::new(), Batching::off()] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dedup.db");
        let options = SqliteOptions::new().batching(batching);
        let url = format!("sqlite://{}", path.display());
        let adapter = SqliteAdapter::connect_with(&url, options).await.unwrap();
        let corrupt = async || {
            let file = SqliteConnectOptions::new().filename(&path);
            let mut connection = file.connect().await.unwrap();
            sqlx::query(CORRUPT).execute(&mut connection).await.unwrap();
        };
        unreadable_response_fails_only_its_caller(&adapter, corrupt).await;
    }
}

#[tokio::test]
async fn connect_reads_table_and_schema_from_the_url() {
    let schema = Schema::fresh();
    let server = crate::support::postgres::shared();
    let and = if server.contains('?') { '&' } else { '?' };
    let url = format!("{server}{and}dedup_table=seen&dedup_schema={}", schema.name());
    let adapter = PostgresAdapter::connect(&url).await.unwrap();
    let claimed = adapter.claim(&[dedup_key("a")], &terms()).await.unwrap();
    assert_eq!(claimed, [Claimed::first(1, false)]);
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let rows = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM seen");
    assert_eq!(rows.fetch_one(&mut connection).await.unwrap(), 1);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dedup.db");
    let url = format!("sqlite://{}?dedup_table=seen", path.display());
    let adapter = SqliteAdapter::connect(&url).await.unwrap();
    adapter.claim(&[dedup_key("a")], &terms()).await.unwrap();
    let mut connection = SqliteConnectOptions::new().filename(&path).connect().await.unwrap();
    let rows = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM seen");
    assert_eq!(rows.fetch_one(&mut connection).await.unwrap(), 1);
    let refused = SqliteAdapter::connect("sqlite://a.db?dedup_table=a%3Bb").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Config);
}
