//! The queue and its runtimes: callers that block a thread, and runtimes that end.

use std::future::Future;
use std::time::Duration;

use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};

use super::queue::{claim, postgres, sqlite};
use crate::support::postgres::Schema;
use crate::support::{FIRST, terms};

/// A caller that has its reply blocks its thread. The lane that has just replied must not wait for this
/// thread.
async fn calls_while_a_caller_blocks_its_thread<A: DedupAdapter + Clone>(adapter: A) {
    for round in 0..20 {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (blocks, is_blocked) = tokio::sync::oneshot::channel();
        let blocking = tokio::spawn({
            let claimed = claim(adapter.clone(), format!("{round}-blocks"), terms());
            async move {
                let claimed = claimed.await;
                blocks.send(()).unwrap();
                let _ = released.recv();
                claimed
            }
        });
        is_blocked.await.unwrap();
        let next = claim(adapter.clone(), format!("{round}-next"), terms());
        let next = tokio::time::timeout(Duration::from_secs(5), next).await;
        release.send(()).unwrap();
        assert_eq!(next.expect("a reply while a thread is blocked").unwrap(), FIRST);
        assert_eq!(blocking.await.unwrap().unwrap(), FIRST);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_on_while_a_caller_blocks_its_thread_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    calls_while_a_caller_blocks_its_thread(sqlite(&dir).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_on_while_a_caller_blocks_its_thread_on_postgres() {
    let schema = Schema::fresh();
    calls_while_a_caller_blocks_its_thread(postgres(&schema).await).await;
}

/// Runtimes come and go over one adapter, each with unfinished calls when it ends.
fn several_runtimes<A: DedupAdapter + Clone>(connect: impl Future<Output = A>) {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let adapter = runtime().block_on(connect);
    for round in 0..20 {
        runtime().block_on(async {
            for at in 0..100 {
                // The calls are not awaited: they end with their runtime.
                tokio::spawn(claim(adapter.clone(), format!("{round}-left-{at}"), terms()));
            }
            let claimed = claim(adapter.clone(), format!("{round}"), terms());
            let claimed = tokio::time::timeout(Duration::from_secs(10), claimed).await;
            assert_eq!(claimed.expect("a reply").unwrap(), ClaimReply::first(1, false));
        });
    }
}

#[test]
fn adapter_outlives_its_runtimes_on_postgres() {
    let schema = Schema::fresh();
    several_runtimes(postgres(&schema));
}

#[test]
fn adapter_outlives_its_runtimes_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    several_runtimes(sqlite(&dir));
}
