//! SQLite's batches where the common case is not all there is: rows that somebody else has written
//! since they were looked up, and completions by who does not hold the key.

use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};
use tower_dedup::adapter::{
    CallTerms, Claimed, Completed, DedupAdapter, EntryState, MaintenanceAdapter, Released, Renewed,
    SqliteAdapter, StoredData, Token,
};
use tower_dedup::{Error, ErrorKind};

use crate::support::{FIRST, dedup_key, on_claim, stored_data};

/// As many as make batches.
const CALLERS: usize = 40;

const HOUR: Duration = Duration::from_secs(3_600);

fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), HOUR, Duration::from_secs(60))
}

/// A file, and somebody else who writes to it.
async fn file() -> (tempfile::TempDir, SqliteAdapter, SqliteConnection) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
    let adapter = SqliteAdapter::connect(&url).await.unwrap();
    adapter.migrate().await.unwrap();
    let other = SqliteConnection::connect(&url).await.unwrap();
    (dir, adapter, other)
}

async fn run(connection: &mut SqliteConnection, sql: &str) {
    sqlx::query(AssertSqlSafe(sql)).execute(connection).await.unwrap();
}

/// A call, again for as long as the file is held for longer than it waits: then nothing was done.
async fn patiently<T, F>(call: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, Error>>,
{
    loop {
        match call().await {
            Err(error) if error.kind() == ErrorKind::Refused => {}
            answer => return answer.unwrap(),
        }
    }
}

/// A row of somebody else's, with times in milliseconds from now.
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

/// Calls that find the file held, and what happens in it meanwhile. They have looked up their keys
/// before.
async fn while_held<T, F, M>(
    mut other: SqliteConnection,
    calls: impl IntoIterator<Item = F>,
    meanwhile: impl FnOnce(SqliteConnection) -> M,
) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
    M: Future<Output = SqliteConnection>,
{
    run(&mut other, "BEGIN IMMEDIATE").await;
    let tasks: Vec<_> = calls.into_iter().map(tokio::spawn).collect();
    // Far less than they wait for the file.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let mut other = meanwhile(other).await;
    run(&mut other, "COMMIT").await;
    join_all(tasks).await.into_iter().map(Result::unwrap).collect()
}

async fn strangers(mut other: SqliteConnection) -> SqliteConnection {
    insert(&mut other, "k1", true, "60000", true).await;
    insert(&mut other, "k2", true, "60000", false).await;
    insert(&mut other, "k3", false, "60000", false).await;
    insert(&mut other, "k4", true, "-1", false).await;
    other
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_meet_what_was_written_since_they_looked() {
    let (_dir, adapter, other) = file().await;
    let calls = (0..CALLERS).map(|at| {
        let (adapter, mine, key) = (adapter.clone(), terms(), [dedup_key(&format!("k{at}"))]);
        async move {
            let claimed = patiently(|| adapter.claim(&key, &mine)).await;
            (claimed[0].clone(), adapter.renew(&key, &mine).await.unwrap()[0])
        }
    });
    let claimed = while_held(other, calls, strangers).await;
    for (at, (claimed, renewed)) in claimed.into_iter().enumerate() {
        let as_expected = match at {
            1 => matches!(claimed, Claimed::Duplicate(_)),
            2 => claimed == Claimed::InFlight,
            3 => claimed == Claimed::first(2, false),
            4 => claimed == Claimed::first(2, true),
            _ => claimed == Claimed::first(1, false),
        };
        assert!(as_expected, "{at}: {claimed:?}");
        let held = if matches!(at, 1 | 2) { Renewed::Lost } else { Renewed::Held };
        assert_eq!(renewed, held, "{at}");
    }
    assert_eq!(adapter.count().await.unwrap(), CALLERS as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_meet_what_was_written_since_they_looked() {
    let (_dir, adapter, other) = file().await;
    let calls = (0..CALLERS).map(|at| {
        let (adapter, mine, key) = (adapter.clone(), terms(), [dedup_key(&format!("k{at}"))]);
        async move {
            let mine = on_claim(&mine);
            let recorded = patiently(|| adapter.claim(&key, &mine)).await.remove(0);
            let again = adapter.claim(&key, &mine).await.unwrap().remove(0);
            let is_first = |claimed: &Claimed| matches!(claimed, Claimed::First { .. });
            assert_eq!(is_first(&recorded), is_first(&again));
            if is_first(&recorded) {
                assert_eq!(recorded, again);
            }
            recorded
        }
    });
    let recorded = while_held(other, calls, strangers).await;
    for (at, recorded) in recorded.into_iter().enumerate() {
        let as_expected = match at {
            1 => matches!(recorded, Claimed::Duplicate(_)),
            2 => recorded == Claimed::InFlight,
            3 => recorded == Claimed::first(2, false),
            4 => recorded == Claimed::first(2, true),
            _ => recorded == FIRST,
        };
        assert!(as_expected, "{at}: {recorded:?}");
    }
    assert_eq!(adapter.count().await.unwrap(), CALLERS as u64);
}

/// What happens to a key between its claim and its completion, and what that is told.
const ODD: [(&str, Completed); 7] = [
    ("DELETE FROM webhook_deliveries", Completed::Inserted),
    ("UPDATE webhook_deliveries SET token = randomblob(16)", Completed::LeaseLost),
    ("UPDATE webhook_deliveries SET token = NULL", Completed::LeaseLost),
    (
        "UPDATE webhook_deliveries SET token = randomblob(16), completed_at = unixepoch() * 1000",
        Completed::LeaseLost,
    ),
    // By this very claim, whose answer was lost.
    ("UPDATE webhook_deliveries SET completed_at = unixepoch() * 1000", Completed::Held),
    // Its lease outlives its retention, which then counts from the completion.
    ("UPDATE webhook_deliveries SET expires_at = 1", Completed::Held),
    ("UPDATE webhook_deliveries SET lease_until = 1", Completed::Held),
];

async fn completions(odd: &[(&str, Completed)]) {
    let (_dir, adapter, other) = file().await;
    let key = |at: usize| [dedup_key(&format!("k{at}"))];
    let call_terms: Vec<_> = (0..CALLERS).map(|_| terms()).collect();
    let claims = call_terms.iter().enumerate().map(|(at, mine)| {
        let (adapter, key) = (adapter.clone(), key(at));
        async move { patiently(|| adapter.claim(&key, mine)).await }
    });
    join_all(claims).await;
    let calls = call_terms.iter().enumerate().map(|(at, mine)| {
        let (adapter, mine, key) = (adapter.clone(), mine.clone(), key(at));
        async move { patiently(|| adapter.complete(&key, &mine)).await[0] }
    });
    // The first goes alone.
    let completed = while_held(other, calls, async |mut other| {
        for (at, (change, _)) in (1..).zip(odd) {
            run(&mut other, &format!("{change} WHERE id = 'k{at}'")).await;
        }
        other
    });
    for (at, completed) in completed.await.into_iter().enumerate() {
        let expected = match at {
            0 => Completed::Held,
            at => odd.get(at - 1).map_or(Completed::Held, |(_, expected)| *expected),
        };
        assert_eq!(completed, expected, "{at} of {odd:?}");
        let entry = adapter.get(&key(at)[0]).await.unwrap().expect("a key that is remembered");
        assert!(matches!(entry.state, EntryState::Complete { .. }), "{at} of {odd:?}: {entry:?}");
    }
}

/// One odd key among many that are held, and one of every sort.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_are_told_whose_key_it_was() {
    for odd in ODD.chunks(1) {
        completions(odd).await;
    }
    completions(&ODD).await;
}

/// What a claim carried is not what is kept, if its completion carries nothing.
#[tokio::test]
async fn a_completion_keeps_what_it_carries_itself() {
    let (_dir, adapter, _other) = file().await;
    let keys = [dedup_key("released"), dedup_key("new")];
    let failed = terms();
    adapter.claim(&keys[..1], &failed).await.unwrap();
    assert_eq!(adapter.release(&keys[..1], &failed).await.unwrap(), [Released::Released]);
    let plain = terms();
    let carries = plain.clone().with_payloads(keys.iter().map(|key| (key.clone(), [7; 32])));
    let claimed = adapter.claim(&keys, &carries).await.unwrap();
    assert_eq!(claimed, [Claimed::first(2, false), Claimed::first(1, false)]);
    assert_eq!(adapter.complete(&keys, &plain).await.unwrap(), [Completed::Held; 2]);
    for key in &keys {
        assert_eq!(stored_data(&adapter, key).await, Some(StoredData::default()));
    }
}
