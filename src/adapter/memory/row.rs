//! [`Row`]: the data of one key in the table, and its state.
//!
//! [`Row::state`] has the same rule as the rows of a database, which `sql::row` states. The conformance
//! suite tests both.

use std::sync::Arc;
use std::time::Duration;

use siphasher::sip128::SipHasher13;

use super::super::replies::Seen;
use super::super::stored::{Fetch, StoredData};
use super::super::terms::{CallTerms, Token};
use super::clock::after;
use crate::key::DedupKey;

/// 128 bits that identify a key in one adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint([u64; 2]);

impl Fingerprint {
    /// Returns the half that the index of a shard uses.
    pub(super) const fn hash(self) -> u64 {
        self.0[0]
    }

    /// Returns one of `count` shards, chosen by the other half.
    pub(super) fn shard(self, count: usize) -> usize {
        // The upper half of the product is below `count`.
        let product = u128::from(self.0[1]) * (count as u128);
        usize::try_from(product >> 64).unwrap_or_default()
    }
}

/// SipHash-1-3 with 128 bits, keyed with random bits that only this adapter knows.
///
/// Two of n keys have the same fingerprint with a probability of about n² / 2¹²⁹. The later one
/// would be taken for a duplicate of the earlier one.
pub(super) struct KeyHasher(SipHasher13);

impl KeyHasher {
    pub(super) fn random() -> Self {
        Self::new(rand::random())
    }

    pub(super) fn new(secret: [u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(&secret))
    }

    pub(super) fn fingerprint(&self, key: &DedupKey) -> Fingerprint {
        let hash = self.0.hash(key.as_bytes());
        Fingerprint([hash.h1, hash.h2])
    }
}

/// Times are milliseconds of the adapter's [`Clock`](super::clock::Clock).
pub(super) struct Row {
    pub(super) fingerprint: Fingerprint,
    /// `None` once the claim was released.
    pub(super) token: Option<Token>,
    pub(super) is_complete: bool,
    /// `completed_at` of a complete row; `lease_until` of any other row.
    pub(super) ends_at: u64,
    pub(super) first_seen_at: u64,
    pub(super) expires_at: u64,
    pub(super) attempts: u32,
    pub(super) takeover: bool,
    /// Set only on complete rows.
    pub(super) stored: Option<Arc<StoredData>>,
}

/// A larger row misses the budget of 96 bytes a key.
const _: () = assert!(size_of::<Row>() == 72);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowState {
    Complete,
    Leased,
    /// Claimed, and the lease has run out.
    Lapsed,
    Released,
    /// Equivalent to a missing row. Never a live lease.
    Expired,
}

impl Row {
    pub(super) fn leased(fingerprint: Fingerprint, terms: &CallTerms, now: u64) -> Self {
        Self {
            fingerprint,
            token: Some(terms.token()),
            is_complete: false,
            ends_at: after(now, terms.lease()),
            first_seen_at: now,
            expires_at: expiry(terms, now),
            attempts: 1,
            takeover: false,
            stored: None,
        }
    }

    /// Marks the row complete. A row that has expired by now is remembered for another retention.
    pub(super) fn complete(&mut self, key: &DedupKey, terms: &CallTerms, now: u64) {
        self.is_complete = true;
        self.ends_at = now;
        self.stored = terms.stored_data_for(key).map(Arc::new);
        if self.expires_at <= now {
            self.expires_at = expiry(terms, now);
        }
    }

    pub(super) fn state(&self, now: u64) -> RowState {
        match (self.is_complete, self.token) {
            (false, Some(_)) if self.ends_at > now => RowState::Leased,
            _ if self.expires_at <= now => RowState::Expired,
            (true, _) => RowState::Complete,
            (false, Some(_)) => RowState::Lapsed,
            (false, None) => RowState::Released,
        }
    }

    /// Returns `true` if this token has claimed the key, and has neither completed nor released it.
    pub(super) fn is_claimed_by(&self, token: Token) -> bool {
        !self.is_complete && self.is_by(token)
    }

    /// Returns `true` if this token holds the key or was the last to hold it before its completion.
    pub(super) fn is_by(&self, token: Token) -> bool {
        self.token == Some(token)
    }

    /// Returns the time from which the row can be purged: a lease may outlive the retention.
    pub(super) fn due(&self) -> u64 {
        let leased = !self.is_complete && self.token.is_some();
        if leased { self.expires_at.max(self.ends_at) } else { self.expires_at }
    }

    pub(super) fn seen(&self, now: u64, fetch: Fetch) -> Seen {
        let mut seen = Seen::new(Duration::from_millis(now.saturating_sub(self.first_seen_at)));
        seen.stored = StoredData::fetched(self.stored.as_ref(), fetch);
        seen
    }
}

fn expiry(terms: &CallTerms, now: u64) -> u64 {
    after(now, terms.retention())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, id: &str) -> DedupKey {
        DedupKey::new(namespace, id).unwrap()
    }

    #[test]
    fn fingerprint_depends_on_where_the_namespace_ends() {
        let hasher = KeyHasher::random();
        let of = |namespace, id| hasher.fingerprint(&key(namespace, id));
        assert_eq!(of("ab", "c"), of("ab", "c"));
        for (namespace, id) in [("a", "bc"), ("abc", "c"), ("ab", "C"), ("ab ", "c"), ("c", "ab")] {
            assert_ne!(of("ab", "c"), of(namespace, id), "{namespace} {id}");
        }
    }

    #[test]
    fn fingerprints_of_two_adapters_differ() {
        let of = || KeyHasher::random().fingerprint(&key("n", "a"));
        assert_ne!(of(), of());
    }

    #[test]
    fn keys_spread_evenly_over_shards() {
        let hasher = KeyHasher::random();
        let mut counts = [0_u32; 7];
        for id in 0..7_000 {
            counts[hasher.fingerprint(&key("n", &id.to_string())).shard(7)] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
        let most = Fingerprint([0, u64::MAX]);
        assert_eq!((most.shard(7), most.shard(1)), (6, 0));
    }

    #[test]
    fn lease_is_due_after_both_the_lease_and_the_retention() {
        let (retention, lease) = (Duration::from_millis(4), Duration::from_millis(7));
        let terms = CallTerms::on_completion(Token::random(), retention, lease);
        let leased = || Row::leased(Fingerprint([0; 2]), &terms, 3);
        assert_eq!((leased().expires_at, leased().due()), (7, 10));
        assert_eq!(leased().state(9), RowState::Leased);
        assert_eq!(leased().state(10), RowState::Expired);
        assert_eq!(Row { token: None, ..leased() }.due(), 7);
        assert_eq!(Row { is_complete: true, ..leased() }.due(), 7);
    }
}
