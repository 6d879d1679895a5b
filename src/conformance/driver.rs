//! Keys, terms and times that the cases share.

use std::time::Duration;

use crate::adapter::{CallTerms, Claimed, MaintenanceAdapter, Token};
use crate::key::DedupKey;

/// Longer than any test takes, shorter than [`RETENTION`].
pub(super) const LEASE: Duration = Duration::from_secs(60);
pub(super) const RETENTION: Duration = Duration::from_secs(3_600);
/// The delay that a busy machine may cause.
pub(super) const SLACK: Duration = Duration::from_secs(20);

/// The reply to the first claim of a key.
pub(super) const FIRST: Claimed = Claimed::first(1, false);

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

/// Returns `true` if there is one reply, and it is a duplicate.
pub(super) fn is_duplicate(replies: &[Claimed]) -> bool {
    matches!(replies, [Claimed::Duplicate(_)])
}

/// Returns the number of stored keys, with expired keys that are not purged yet.
pub(super) async fn rows<A: MaintenanceAdapter + ?Sized>(adapter: &A) -> u64 {
    let stats = adapter.stats().await.unwrap();
    assert!(stats.is_exact, "a small store is counted: {stats:?}");
    stats.rows
}
