//! The connections of the queue's workers: one that is lost is counted.

use futures_util::future::join_all;
use metrics_util::debugging::DebuggingRecorder;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;

use super::observed::{measured, value};
use support::effects::Database;
use support::{dedup_key, on_claim, terms};

/// The workers run on the thread of the test, and so count with its recorder.
#[tokio::test]
async fn worker_that_loses_its_connection_is_counted() {
    let recorder = DebuggingRecorder::new();
    let _recorder = metrics::set_default_local_recorder(&recorder);
    let snapshotter = recorder.snapshotter();
    let restarts =
        || value(&measured(&snapshotter), "tower_dedup_worker_restarts_total", &["postgres"]);
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::new(database.pool(10));
    let claims = async |round: &str| {
        let claim = async |id| {
            let key = dedup_key(&format!("{round}-{id}"));
            adapter.claim(&key, &on_claim(&terms())).await.is_ok()
        };
        join_all((0..16).map(claim)).await.into_iter().all(|is_ok| is_ok)
    };
    assert!(claims("before").await);
    assert_eq!(restarts(), 0.0);
    database.terminate("true").await;
    claims("after").await;
    assert!(restarts() >= 1.0);
    assert!(claims("later").await);
    assert_eq!(restarts(), 0.0);
}
