//! Keys, terms and times that the cases share.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::try_join_all;

use super::store::Store;
use crate::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use crate::adapter::inspect::MaintenanceAdapter;
use crate::key::DedupKey;

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
    leased_for(LEASE)
}

/// Returns the terms of a claim under a lease of this length.
pub(super) fn leased_for(lease: Duration) -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, lease)
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
pub(super) async fn reply<A: DedupAdapter + ?Sized>(
    adapter: &A,
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
        },
        "complete" => match adapter.complete(key, terms).await.unwrap() {
            CompleteReply::Held => "H",
            CompleteReply::LeaseLost => "L",
            CompleteReply::Inserted => "I",
        },
        "release" | "undo" => adapter.release(key, terms).await.map(|()| "").unwrap(),
        _ => match adapter.claim(key, terms).await.unwrap() {
            ClaimReply::First { attempt, takeover } => {
                return format!("{attempt}{}", if takeover { "t" } else { "" });
            }
            ClaimReply::Duplicate(_) => "D",
            ClaimReply::InFlight => "-",
        },
    };
    letter.to_owned()
}

/// Makes calls for one key, one after the other: `a claim 1` is a claim by token *a* with the [`reply`] `1`, and `40 s`
/// lets this time pass. A lease is 60 s, the retention 3,600 s.
pub(super) async fn story<S: Store>(store: &S, id: &str, calls: &str) {
    let (adapter, key, mut tokens) = (store.adapter(), key(id), HashMap::new());
    for step in calls.split("; ") {
        let mut words = step.split(' ');
        let (who, call) = words.next().zip(words.next()).expect("a step");
        if call == "s" {
            store.advance(Duration::from_secs(who.parse().expect("seconds"))).await;
            continue;
        }
        let terms = tokens.entry(who).or_insert_with(leased);
        let expected = words.next().unwrap_or_default();
        assert_eq!(reply(&*adapter, call, &key, terms).await, expected, "{step} of: {calls}");
    }
}

pub(super) fn is_duplicate(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::Duplicate(_))
}

/// Claims several keys at the same time. Returns the reply for each.
pub(super) async fn claim_all<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Vec<ClaimReply> {
    try_join_all(keys.iter().map(|key| adapter.claim(key, terms))).await.unwrap()
}

/// Completes several keys at the same time. Returns the reply for each.
pub(super) async fn complete_all<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Vec<CompleteReply> {
    try_join_all(keys.iter().map(|key| adapter.complete(key, terms))).await.unwrap()
}

/// Returns the number of stored keys, with expired keys that are not purged yet.
pub(super) async fn rows<A: MaintenanceAdapter + ?Sized>(adapter: &A) -> u64 {
    let stats = adapter.stats().await.unwrap();
    assert!(stats.is_exact, "a small store is counted: {stats:?}");
    stats.rows
}
