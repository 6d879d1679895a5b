//! SQLite's batches in rare cases. Another process writes rows after the lookup, or a caller
//! completes a key that it does not hold.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::SqliteConnection;
use tower_dedup::adapter::SqliteAdapter;
use tower_dedup::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter, StoredData};
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::{StoreError, StoreErrorKind};

use super::sqlite::{File, run};
use crate::support::{
    FIRST, claim_all, complete_all, dedup_key, on_claim, rows, stored_data, terms,
};

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

/// A change of the row between claim and completion, and the reply to the completion.
const CHANGES: [(&str, CompleteReply); 7] = [
    ("DELETE FROM webhook_deliveries", CompleteReply::Inserted),
    ("UPDATE webhook_deliveries SET token = randomblob(16)", CompleteReply::LeaseLost),
    ("UPDATE webhook_deliveries SET token = NULL", CompleteReply::LeaseLost),
    (
        "UPDATE webhook_deliveries SET token = randomblob(16), completed_at = unixepoch() * 1000",
        CompleteReply::LeaseLost,
    ),
    // The same claim has completed the key, and its reply was lost.
    ("UPDATE webhook_deliveries SET completed_at = unixepoch() * 1000", CompleteReply::Held),
    // The lease outlives the retention, which then starts at the completion.
    ("UPDATE webhook_deliveries SET expires_at = 1", CompleteReply::Held),
    ("UPDATE webhook_deliveries SET lease_until = 1", CompleteReply::Held),
];

async fn completions(changes: &[(&str, CompleteReply)]) {
    let (_dir, adapter, other) = file().await;
    let key = |at: usize| dedup_key(&format!("k{at}"));
    let call_terms: Vec<_> = (0..CALLERS).map(|_| terms()).collect();
    let claims = call_terms.iter().enumerate().map(|(at, mine)| {
        let (adapter, key) = (adapter.clone(), key(at));
        async move { patiently(|| adapter.claim(&key, mine)).await }
    });
    join_all(claims).await;
    let calls = call_terms.iter().enumerate().map(|(at, mine)| {
        let (adapter, mine, key) = (adapter.clone(), mine.clone(), key(at));
        async move { patiently(|| adapter.complete(&key, &mine)).await }
    });
    // The first call goes alone.
    let completed = while_held(other, calls, async |mut other| {
        for (at, (change, _)) in (1..).zip(changes) {
            run(&mut other, &format!("{change} WHERE id = 'k{at}'")).await;
        }
        other
    });
    for (at, completed) in completed.await.into_iter().enumerate() {
        let expected = match at {
            0 => CompleteReply::Held,
            at => changes.get(at - 1).map_or(CompleteReply::Held, |(_, expected)| *expected),
        };
        assert_eq!(completed, expected, "{at} of {changes:?}");
        let entry = adapter.get(&key(at)).await.unwrap().expect("a key that is remembered");
        assert!(matches!(entry.state, KeyState::Complete), "{at} of {changes:?}: {entry:?}");
    }
}

/// One change among many held keys, then all changes at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_reports_whether_its_token_held_the_key() {
    for changes in CHANGES.chunks(1) {
        completions(changes).await;
    }
    completions(&CHANGES).await;
}

/// The payload digest of a claim is not stored if the completion carries none.
#[tokio::test]
async fn completion_stores_its_own_data_and_not_that_of_the_claim() {
    let (_dir, adapter, _other) = file().await;
    let keys = [dedup_key("released"), dedup_key("new")];
    let failed = terms();
    adapter.claim(&keys[0], &failed).await.unwrap();
    adapter.release(&keys[0], &failed).await.unwrap();
    let plain = terms();
    let carries = plain.clone().with_payloads(keys.iter().map(|key| (key.clone(), [7; 32])));
    let claimed = claim_all(&adapter, &keys, &carries).await.unwrap();
    assert_eq!(claimed, [ClaimReply::first(2, false), ClaimReply::first(1, false)]);
    assert_eq!(complete_all(&adapter, &keys, &plain).await.unwrap(), [CompleteReply::Held; 2]);
    for key in &keys {
        assert_eq!(stored_data(&adapter, key).await, Some(StoredData::default()));
    }
}
