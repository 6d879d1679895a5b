//! Keys, terms and times that the cases share.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::try_join_all;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use crate::case::Case;
use crate::trace::Traced;

/// Longer than any test takes, shorter than [`RETENTION`].
pub(super) const LEASE: Duration = Duration::from_secs(60);
pub(super) const RETENTION: Duration = Duration::from_secs(3_600);
/// The delay that a busy machine may cause.
pub(super) const SLACK: Duration = Duration::from_secs(20);

/// The reply to the first claim of a key.
pub(super) const FIRST: ClaimReply = ClaimReply::first(1, false);

pub(super) fn key(id: &str) -> DedupKey {
    DedupKey::new("conformance", id).expect("a key")
}

/// Returns the terms of a claim that is complete at once.
pub(super) fn complete_at_once() -> CallTerms {
    CallTerms::on_claim(Token::random(), RETENTION)
}

/// Returns the terms of a claim under a lease.
pub(super) fn leased() -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, LEASE)
}

/// Returns terms of a claim that is complete at once, with the same token and retention.
pub(super) fn at_once(terms: &CallTerms) -> CallTerms {
    CallTerms::on_claim(terms.token(), terms.retention())
}

/// Makes a call: `claim`, `renew`, `complete`, `release`; `once` is a claim that is complete at once, `undo` its release.
/// Returns a letter for its reply:
///
/// - a claim: the attempt, `t` for a takeover; `D`uplicate, `-` in flight,
/// - a renewal: `H`eld, `L`ost; a completion: `H`eld, `L`ease lost, `I`nserted; a release: nothing.
pub(super) async fn reply(
    adapter: &Traced,
    call: &str,
    key: &DedupKey,
    terms: &CallTerms,
) -> String {
    let terms = if matches!(call, "once" | "undo") { &at_once(terms) } else { terms };
    let letter = match call {
        "renew" => match adapter.renew(key, terms).await.unwrap() {
            RenewReply::Held => "H",
            RenewReply::Locked => "locked",
            RenewReply::Lost => "L",
            other => panic!("{other:?}"),
        },
        "complete" => match adapter.complete(key, terms).await.unwrap() {
            CompleteReply::Held => "H",
            CompleteReply::LeaseLost => "L",
            CompleteReply::Inserted => "I",
            other => panic!("{other:?}"),
        },
        "release" | "undo" => adapter.release(key, terms).await.map(|()| "").unwrap(),
        _ => match adapter.claim(key, terms).await.unwrap() {
            ClaimReply::First { attempt, takeover, .. } => {
                return format!("{attempt}{}", if takeover { "t" } else { "" });
            }
            ClaimReply::Duplicate(_) => "D",
            ClaimReply::InFlight => "-",
            other => panic!("{other:?}"),
        },
    };
    letter.to_owned()
}

/// Makes calls for a new key, one after the other: `a claim 1` is a claim by token *a* with the [`reply`] `1`. `40 s` lets
/// this time pass, and `40 back` sets the clock back. A lease is 60 s, the retention 3,600 s.
pub(super) async fn story(store: &Case, calls: &str) {
    let key = key(&format!("story {:016x}", rand::random::<u64>()));
    let (adapter, mut tokens) = (store.adapter(), HashMap::new());
    for step in calls.split("; ") {
        let mut words = step.split(' ');
        let (who, call) = words.next().zip(words.next()).expect("a step");
        let time = || Duration::from_secs(who.parse().expect("seconds"));
        match call {
            "s" => store.advance(time()).await,
            "back" => store.set_back(time()).await,
            _ => {
                let terms = tokens.entry(who).or_insert_with(leased);
                let reply = reply(&adapter, call, &key, terms).await;
                assert_eq!(reply, words.next().unwrap_or_default(), "{step} of: {calls}");
            }
        }
    }
}

/// Declares cases of [`stories`](story).
macro_rules! stories {
    ($($(#[$doc:meta])+ fn $case:ident() { $($calls:expr;)+ })+) => {$(
        $(#[$doc])+
        pub(super) async fn $case(store: $crate::case::Case) {
            $(story(&store, $calls).await;)+
        }
    )+};
}
pub(super) use stories;

/// Makes a row of this name for each key; its token is that of the terms.
///
/// A row that is called *expired* was in the state before, and its retention has ended.
pub(super) async fn prepare(store: &Case, row: &str, keys: &[(DedupKey, CallTerms)]) {
    let adapter = store.adapter();
    let (is_expired, state) = row.strip_prefix("expired ").map_or((false, row), |row| (true, row));
    for (key, mine) in keys {
        let first = match state {
            "none" | "inserted" | "released unclaimed" => continue,
            "released at once" => at_once(mine),
            "taken" => leased(),
            "leased" if is_expired => {
                CallTerms::on_completion(mine.token(), RETENTION, 3 * RETENTION)
            }
            _ => mine.clone(),
        };
        adapter.claim(key, &first).await.unwrap();
    }
    if state == "lapsed" || state == "taken" {
        store.advance(LEASE + SLACK).await;
    }
    for (key, mine) in keys {
        match state {
            "none" | "leased" | "lapsed" => {}
            "released unclaimed" | "released" => adapter.release(key, mine).await.unwrap(),
            "released at once" => adapter.release(key, &at_once(mine)).await.unwrap(),
            "taken" => drop(adapter.claim(key, mine).await.unwrap()),
            _ => drop(adapter.complete(key, mine).await.unwrap()),
        }
    }
    if is_expired {
        store.advance(RETENTION + SLACK).await;
    }
}

pub(super) fn is_duplicate(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::Duplicate(_))
}

/// Claims several keys at the same time. Returns the reply for each.
pub(super) async fn claim_all(
    adapter: &Traced,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Vec<ClaimReply> {
    try_join_all(keys.iter().map(|key| adapter.claim(key, terms))).await.unwrap()
}

/// Completes several keys at the same time. Returns the reply for each.
pub(super) async fn complete_all(
    adapter: &Traced,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Vec<CompleteReply> {
    try_join_all(keys.iter().map(|key| adapter.complete(key, terms))).await.unwrap()
}

/// Returns the number of stored keys, with expired keys that are not purged yet.
pub(super) async fn rows(adapter: &Traced) -> u64 {
    let stats = adapter.stats().await.unwrap();
    assert!(stats.is_exact, "a small store is counted: {stats:?}");
    stats.rows
}
