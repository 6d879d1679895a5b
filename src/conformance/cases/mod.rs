//! The cases. Each takes a fresh store and panics where the store breaks a rule.

use std::time::Duration;

use crate::adapter::{CallTerms, Claimed, Token};
use crate::key::DedupKey;

mod contract;
mod races;
mod recall;

pub use contract::*;
pub use races::*;
pub use recall::*;

/// Long beside any test, short beside the retention.
pub(in crate::conformance) const LEASE: Duration = Duration::from_secs(60);
const RETENTION: Duration = Duration::from_secs(3_600);
/// What a busy machine may be late by.
const SLACK: Duration = Duration::from_secs(20);

pub(in crate::conformance) fn key(id: &str) -> DedupKey {
    DedupKey::new("conformance", id).expect("a key")
}

pub(in crate::conformance) fn terms(lease: Duration) -> CallTerms {
    CallTerms::new(Token::random(), RETENTION).with_lease(lease)
}

fn new_receipt() -> CallTerms {
    terms(LEASE)
}

fn is_duplicate(answers: &[Claimed]) -> bool {
    matches!(answers, [Claimed::Duplicate(_)])
}
