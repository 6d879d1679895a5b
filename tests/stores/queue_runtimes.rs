//! The queue and its runtimes, which end.

use std::time::Duration;

use tower_dedup::adapter::contract::ClaimReply;

use super::queue::{claim, sqlite};
use crate::support::terms;

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
