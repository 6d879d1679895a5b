//! The queue and its runtimes, which end, or run no task for a while.

use std::sync::mpsc::channel;
use std::time::Duration;

use tokio::time::timeout;
use tower_dedup::StoreError;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter, RenewReply};
use tower_dedup::adapter::{SqliteAdapter, SqliteOptions};
use tower_dedup::internals::with_sqlite_bounds;

use super::queue::{claim, sqlite, sqlite_with};
use crate::support::{dedup_key, terms};

const SOON: Duration = Duration::from_secs(5);

/// Runtimes come and go over one adapter, each with unfinished calls when it ends.
#[test]
fn adapter_outlives_its_runtimes_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let adapter = runtime().block_on(sqlite(&dir));
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

/// A renewal is queued without a lookup.
async fn renew(adapter: SqliteAdapter, id: usize) -> Result<RenewReply, StoreError> {
    adapter.renew(&dedup_key(&id.to_string()), &terms()).await
}

/// The runtimes live on, and their tasks have no turn after the last reply.
#[test]
fn runtime_that_stops_after_its_last_reply_delays_no_other() {
    // A caller that has its reply goes on before another task.
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(1)
            .build()
            .unwrap()
    };
    let (dir, runtimes) = (tempfile::tempdir().unwrap(), [runtime(), runtime()]);
    let adapter = runtimes[0].block_on(sqlite(&dir));
    for id in 0..6 {
        let call = async { timeout(SOON, renew(adapter.clone(), id)).await };
        let reply = runtimes[id % 2].block_on(call).expect("a reply");
        assert_eq!(reply.unwrap(), RenewReply::Held);
    }
}

/// A caller that has its reply blocks its thread, which may drive the timers. The worker has another call to send,
/// and must not wait for this thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caller_that_blocks_its_thread_delays_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = sqlite_with(&dir, with_sqlite_bounds(SqliteOptions::new(), 1, 8)).await;
    for id in 0..20 {
        let (release, released) = channel::<()>();
        let first = renew(adapter.clone(), id);
        let blocking = tokio::spawn(async move {
            let reply = first.await;
            (reply, released.recv_timeout(SOON))
        });
        let second = tokio::spawn(renew(adapter.clone(), id + 100)).await.unwrap();
        assert_eq!(second.unwrap(), RenewReply::Held);
        let _ = release.send(());
        let (reply, released) = blocking.await.unwrap();
        assert_eq!(reply.unwrap(), RenewReply::Held);
        released.expect("a reply to the other caller");
    }
}
