//! SQLite's batches in rare cases. Another process writes rows after the lookup, or a caller
//! completes a key that it does not hold.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::SqliteConnection;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::{StoreError, StoreErrorKind};

use super::sqlite::{File, run};
use support::{FIRST, dedup_key, on_claim, rows, terms};

/// Enough callers to form batches.
const CALLERS: usize = 40;

/// A file, and another process that writes to it.
async fn file() -> (File, SqliteAdapter, SqliteConnection) {
    let file = File::new();
    let adapter = file.connect().await;
    adapter.migrate().await.unwrap();
    let other = file.connection().await;
    (file, adapter, other)
}

/// Repeats a call while the other process holds the file. A refused call has no effect, so its
/// repetition counts as the first call.
async fn patiently<T, F>(call: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, StoreError>>,
{
    loop {
        match call().await {
            Err(error) if error.kind() == StoreErrorKind::Refused => {}
            answer => return answer.unwrap(),
        }
    }
}

/// Inserts a row of another process, with times in milliseconds from now.
async fn insert(other: &mut SqliteConnection, id: &str, held: bool, lease: &str, complete: bool) {
    let token = if held { "randomblob(16)" } else { "NULL" };
    let completed_at = if complete { "unixepoch() * 1000" } else { "NULL" };
    let sql = format!(
        "INSERT INTO webhook_deliveries (namespace, id, token, lease_until, attempts, takeover, \
         first_seen_at, completed_at, expires_at) VALUES ('test', '{id}', {token}, \
         unixepoch() * 1000 + {lease}, 1, 0, unixepoch() * 1000, {completed_at}, \
         unixepoch() * 1000 + 60000)"
    );
    run(other, &sql).await;
}

/// Makes calls while the other process holds the write lock, then lets it change rows and commit.
async fn while_held<T, F, M>(
    mut other: SqliteConnection,
    calls: impl IntoIterator<Item = F>,
    change: impl FnOnce(SqliteConnection) -> M,
) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
    M: Future<Output = SqliteConnection>,
{
    run(&mut other, "BEGIN IMMEDIATE").await;
    let tasks: Vec<_> = calls.into_iter().map(tokio::spawn).collect();
    // Time for the calls to look up their keys and to wait for the write lock, which SQLite shows to no
    // other connection. A late lookup finds the changed rows, and the replies are the same.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let mut other = change(other).await;
    run(&mut other, "COMMIT").await;
    join_all(tasks).await.into_iter().map(Result::unwrap).collect()
}

async fn insert_rows_of_another_process(mut other: SqliteConnection) -> SqliteConnection {
    insert(&mut other, "k1", true, "60000", true).await;
    insert(&mut other, "k2", true, "60000", false).await;
    insert(&mut other, "k3", false, "60000", false).await;
    insert(&mut other, "k4", true, "-1", false).await;
    other
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_find_rows_written_after_their_lookup() {
    for at_once in [false, true] {
        let (_dir, adapter, other) = file().await;
        let calls = (0..CALLERS).map(|at| {
            let (adapter, key) = (adapter.clone(), dedup_key(&format!("k{at}")));
            let mine = if at_once { on_claim(&terms()) } else { terms() };
            async move {
                let claimed = patiently(|| adapter.claim(&key, &mine)).await;
                let again = adapter.claim(&key, &mine).await.unwrap();
                (claimed, again)
            }
        });
        let claimed = while_held(other, calls, insert_rows_of_another_process).await;
        for (at, (claimed, again)) in claimed.into_iter().enumerate() {
            let as_expected = match at {
                1 => matches!(claimed, ClaimReply::Duplicate(_)),
                2 => claimed == ClaimReply::InFlight,
                3 => claimed == ClaimReply::first(2, false),
                4 => claimed == ClaimReply::first(2, true),
                _ => claimed == FIRST,
            };
            assert!(as_expected, "{at}: {claimed:?}");
            let is_first = |claimed: &ClaimReply| matches!(claimed, ClaimReply::First { .. });
            assert!(
                again == claimed || !is_first(&claimed) && !is_first(&again),
                "{at}: {again:?}"
            );
        }
        assert_eq!(rows(&adapter).await, CALLERS as u64);
    }
}

/// This process has read that the leases lapsed. When it writes its claims, another process holds one of the
/// keys, and has completed the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_spare_rows_that_another_process_takes_over_after_they_were_read() {
    for at_once in [false, true] {
        let (_dir, adapter, mut other) = file().await;
        insert(&mut other, "held", true, "-1", false).await;
        insert(&mut other, "done", true, "-1", false).await;
        let calls = ["held", "done"].map(|id| {
            let (adapter, key) = (adapter.clone(), dedup_key(id));
            let mine = if at_once { on_claim(&terms()) } else { terms() };
            async move { patiently(|| adapter.claim(&key, &mine)).await }
        });
        let claimed = while_held(other, calls, async |mut other| {
            let update = "UPDATE webhook_deliveries SET token = randomblob(16)";
            let live = "lease_until = unixepoch() * 1000 + 60000 WHERE id = 'held'";
            run(&mut other, &format!("{update}, {live}")).await;
            let complete = "completed_at = unixepoch() * 1000 WHERE id = 'done'";
            run(&mut other, &format!("{update}, {complete}")).await;
            other
        });
        let claimed = claimed.await;
        assert_eq!(claimed[0], ClaimReply::InFlight, "at once: {at_once}");
        assert!(matches!(claimed[1], ClaimReply::Duplicate(_)), "at once: {at_once}: {claimed:?}");
    }
}
