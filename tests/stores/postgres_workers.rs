//! The connections of the queue's workers: one that is lost is counted.

use std::str::FromStr;

use futures_util::future::join_all;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tower_dedup::StoreError;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};

use crate::support::postgres::{Schema, shared};
use crate::support::{dedup_key, on_claim, terms};

/// Returns the name of the adapter's sessions, and the adapter.
fn named(schema: &Schema) -> (String, PostgresAdapter) {
    let name = format!("{}_workers", schema.name());
    let connect = PgConnectOptions::from_str(&schema.url()).unwrap().application_name(&name);
    let pool = PgPoolOptions::new().connect_lazy_with(connect);
    (name, PostgresAdapter::new(pool))
}

async fn claims(adapter: &PostgresAdapter, round: &str) -> Vec<Result<ClaimReply, StoreError>> {
    let all = (0..16).map(|id| {
        let (adapter, key) = (adapter.clone(), dedup_key(&format!("{round}-{id}")));
        async move { adapter.claim(&key, &on_claim(&terms())).await }
    });
    join_all(all).await
}

/// Terminates all sessions. Returns their number.
async fn cut(name: &str) -> i64 {
    let mut admin = PgConnection::connect(shared()).await.unwrap();
    let cut = format!(
        "WITH ours AS MATERIALIZED \
         (SELECT pid FROM pg_stat_activity WHERE application_name = '{name}') \
         SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM ours"
    );
    sqlx::query_scalar(AssertSqlSafe(cut)).fetch_one(&mut admin).await.unwrap()
}

#[test]
fn worker_that_loses_its_connection_is_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let restarts = || {
        let all = snapshotter.snapshot().into_vec().into_iter();
        let mut found = all.filter(|(key, ..)| {
            let key = key.key();
            key.name() == "tower_dedup_worker_restarts_total"
                && key.labels().all(|label| (label.key(), label.value()) == ("store", "postgres"))
        });
        match found.next() {
            Some((.., DebugValue::Counter(count))) => count,
            None => 0,
            other => panic!("{other:?}"),
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The workers run on this thread, and so count with its recorder.
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let schema = Schema::fresh();
            let (name, adapter) = named(&schema);
            let claims = async |round: &str| claims(&adapter, round).await;
            assert!(claims("before").await.iter().all(Result::is_ok));
            assert_eq!(restarts(), 0);
            cut(&name).await;
            let _ = claims("after").await;
            assert!(restarts() >= 1);
            assert!(claims("later").await.iter().all(Result::is_ok));
            assert_eq!(restarts(), 0);
        });
    });
}
