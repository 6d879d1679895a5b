//! The queue and its runtimes, which end.

use std::future::Future;
use std::time::Duration;

use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};

use super::queue::{claim, postgres, sqlite};
use crate::support::postgres::Schema;
use crate::support::terms;

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
