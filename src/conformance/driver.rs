//! Keys, terms and times that the cases share.

use std::time::Duration;

use futures_util::future::try_join_all;

use crate::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, Token};
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
