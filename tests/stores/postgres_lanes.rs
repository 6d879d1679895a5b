//! The connections of the queue's lanes: one that is lost is counted.

use std::str::FromStr;

use futures_util::future::join_all;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tower_dedup::adapter::{DedupAdapter, PostgresAdapter};

use crate::support::postgres::{Schema, shared};
use crate::support::{dedup_key, on_claim, terms};

#[test]
fn lane_that_loses_its_connection_is_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let restarts = || {
        let all = snapshotter.snapshot().into_vec().into_iter();
        let mut found = all.filter(|(key, ..)| {
            let key = key.key();
            key.name() == "tower_dedup_lane_restarts_total"
                && key.labels().all(|label| (label.key(), label.value()) == ("store", "postgres"))
        });
        match found.next() {
            Some((.., DebugValue::Counter(count))) => count,
            None => 0,
            other => panic!("{other:?}"),
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The lanes run on this thread, and so count with its recorder.
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let schema = Schema::fresh();
            let name = format!("{}_lanes", schema.name());
            let options =
                PgConnectOptions::from_str(&schema.url()).unwrap().application_name(&name);
            let adapter = PostgresAdapter::new(PgPoolOptions::new().connect_lazy_with(options));
            let claims = async |round: &str| {
                let all = (0..16).map(|id| {
                    let (adapter, key) = (adapter.clone(), dedup_key(&format!("{round}-{id}")));
                    async move { adapter.claim(&key, &on_claim(&terms())).await }
                });
                join_all(all).await
            };
            assert!(claims("before").await.iter().all(Result::is_ok));
            assert_eq!(restarts(), 0);
            let mut admin = PgConnection::connect(shared()).await.unwrap();
            let cut = format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                 WHERE application_name = '{name}'"
            );
            sqlx::query(AssertSqlSafe(cut)).execute(&mut admin).await.unwrap();
            let _ = claims("after").await;
            assert!(restarts() >= 1);
            assert!(claims("later").await.iter().all(Result::is_ok));
            assert_eq!(restarts(), 0);
        });
    });
}
