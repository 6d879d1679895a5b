//! The connections of the queue's workers: one that is lost is counted.

use futures_util::future::join_all;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;

use support::effects::Database;
use support::{dedup_key, on_claim, terms};

/// The workers run on the thread of the test, and so count with its recorder.
#[tokio::test]
async fn worker_that_loses_its_connection_is_counted() {
    let recorder = DebuggingRecorder::new();
    let _recorder = metrics::set_default_local_recorder(&recorder);
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
    assert_eq!(restarts(), 0);
    database.terminate("true").await;
    claims("after").await;
    assert!(restarts() >= 1);
    assert!(claims("later").await);
    assert_eq!(restarts(), 0);
}
