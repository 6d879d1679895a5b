//! The cases. Each takes a fresh store and panics where the store breaks a rule.

use std::time::Duration;

use crate::adapter::{CallTerms, Claimed, Token};
use crate::key::DedupKey;

mod contract;
mod races;
mod stored;

pub use contract::*;
pub use races::*;
pub use stored::*;

/// Long beside any test, short beside the retention.
const LEASE: Duration = Duration::from_secs(60);
const RETENTION: Duration = Duration::from_secs(3_600);
/// What a busy machine may be late by.
const SLACK: Duration = Duration::from_secs(20);

pub(in crate::conformance) fn key(id: &str) -> DedupKey {
    DedupKey::new("conformance", id).expect("a key")
}

/// Terms of a claim that is complete at once.
pub(in crate::conformance) fn complete_at_once() -> CallTerms {
    CallTerms::on_claim(Token::random(), RETENTION)
}

/// Terms of a claim under a lease.
pub(in crate::conformance) fn leased() -> CallTerms {
    leased_for(LEASE)
}

fn leased_for(lease: Duration) -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, lease)
}

/// The reply to the first claim of a key.
pub(in crate::conformance) const FIRST: Claimed = Claimed::first(1, false);

fn is_duplicate(replies: &[Claimed]) -> bool {
    matches!(replies, [Claimed::Duplicate(_)])
}
