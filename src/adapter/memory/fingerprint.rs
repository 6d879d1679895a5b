//! What the table knows a key by.

use siphasher::sip128::SipHasher13 as SipHasher128;

use super::super::contract::{CallTerms, Token};
use crate::key::DedupKey;

/// 128 bits that stand for a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint([u64; 2]);

impl Fingerprint {
    /// The half that the index of a shard goes by.
    pub(super) const fn hash(self) -> u64 {
        self.0[0]
    }

    /// The shard, of so many, that the other half chooses.
    pub(super) fn shard(self, of: usize) -> usize {
        // The upper half of the product is below the number of shards.
        let product = u128::from(self.0[1]) * (of as u128);
        usize::try_from(product >> 64).unwrap_or_default()
    }
}

/// SipHash-1-3, which the standard library's maps use too, with 128 bits and under keys that only
/// this adapter knows.
///
/// 1. Keys of the sender's choosing do not collide on purpose: who does not know the 128 random
///    bits can do no better than chance.
/// 2. By chance, two of n keys share a fingerprint with a probability of about n² / 2¹²⁹: 1.5 in
///    10²⁷ for a million keys, 1.5 in 10²¹ for a thousand million. The later one would be a
///    duplicate of the earlier.
pub(super) struct Keyed {
    keys: SipHasher128,
    tags: [u128; 3],
}

impl Keyed {
    pub(super) fn random() -> Self {
        Self::new(rand::random(), rand::random())
    }

    pub(super) fn new(keys: [u8; 16], tags: [u128; 3]) -> Self {
        Self { keys: SipHasher128::new_with_key(&keys), tags }
    }

    pub(super) fn fingerprint(&self, key: &DedupKey) -> Fingerprint {
        let hash = self.keys.hash(key.as_bytes());
        Fingerprint([hash.h1, hash.h2])
    }

    /// The tag is a sum of products with random numbers, of which the upper half is kept: a
    /// "multilinear" hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
    /// Two tokens, whoever chose them, have the same with a probability of 1 in 2⁶⁴ over those
    /// numbers. Unlike a fingerprint, a tag is never looked up, and shown to nobody: it need not
    /// withstand who can try.
    pub(super) fn caller(&self, terms: &CallTerms) -> Caller {
        let token = terms.token();
        let bits = u128::from_le_bytes(*token.as_bytes());
        let (low, high) = (bits & u128::from(u64::MAX), bits >> 64);
        let [base, by_low, by_high] = self.tags;
        let sum =
            base.wrapping_add(by_low.wrapping_mul(low)).wrapping_add(by_high.wrapping_mul(high));
        // The upper half is below 2⁶⁴.
        Caller { token, tag: u64::try_from(sum >> 64).unwrap_or_default() }
    }
}

/// Who makes a call.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    token: Token,
    tag: u64,
}

/// Who holds a key, or has completed it.
#[derive(Clone, Copy)]
pub(super) struct Holder {
    /// `None` for a complete key in a packed slot, which has room for the tag only.
    ///
    /// That is enough to tell a repetition of the call that completed the key from the call of
    /// somebody else: the tag is a hash under random numbers, so tokens of any make differ in it, but
    /// for one in 2⁶⁴. No lease hangs on it.
    pub(super) token: Option<Token>,
    pub(super) tag: u64,
}

impl Holder {
    pub(super) fn is(&self, caller: &Caller) -> bool {
        self.tag == caller.tag && self.token.is_none_or(|token| token == caller.token)
    }
}

impl From<Caller> for Holder {
    fn from(Caller { token, tag }: Caller) -> Self {
        Self { token: Some(token), tag }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, id: &str) -> DedupKey {
        DedupKey::new(namespace, id).unwrap()
    }

    #[test]
    fn trap_19_a_fingerprint_knows_where_the_namespace_ends() {
        let keyed = Keyed::random();
        let of = |namespace, id| keyed.fingerprint(&key(namespace, id)).0;
        assert_eq!(of("ab", "c"), of("ab", "c"));
        for (namespace, id) in [("a", "bc"), ("abc", "c"), ("ab", "C"), ("ab ", "c"), ("c", "ab")] {
            assert_ne!(of("ab", "c"), of(namespace, id), "{namespace} {id}");
        }
    }

    #[test]
    fn every_adapter_has_fingerprints_of_its_own() {
        let of = || Keyed::random().fingerprint(&key("n", "a")).0;
        assert_ne!(of(), of());
    }

    #[test]
    fn shards_are_chosen_evenly() {
        let keyed = Keyed::random();
        let mut counts = [0_u32; 7];
        for id in 0..7_000 {
            let fingerprint = keyed.fingerprint(&key("n", &id.to_string()));
            counts[fingerprint.shard(7)] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
        let most = Fingerprint([0, u64::MAX]);
        assert_eq!(most.shard(7), 6);
        assert_eq!(most.shard(1), 0);
    }

    #[test]
    fn a_tag_tells_tokens_apart_that_differ_in_any_byte() {
        let keyed = Keyed::random();
        let caller = |token: [u8; 16]| {
            let terms = CallTerms::on_claim(Token::from(token), std::time::Duration::ZERO);
            keyed.caller(&terms)
        };
        let mine = caller([0; 16]);
        let packed = Holder { token: None, tag: mine.tag };
        assert!(packed.is(&mine));
        for place in 0..16 {
            let mut token = [0; 16];
            token[place] = 1;
            assert!(!packed.is(&caller(token)), "{place}");
        }
    }
}
