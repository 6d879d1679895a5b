//! [`Shard`]: the rows under one lock, and the order in which they are due.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use siphasher::sip128::SipHasher13;

use super::clock::END;
use super::gauge::Pressure;
use super::row::Row;
use crate::adapter::inspection::KeyState;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// How many expired keys are removed for a new one. More than one, so that a store that is only
/// written to stays clean without a purger.
const PURGED_PER_INSERT: usize = 2;
/// An empty shard keeps memory for this many rows.
const KEPT_ROWS: usize = 128;

/// How a full [`MemoryAdapter`](super::MemoryAdapter) treats a new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AtCapacity {
    /// Refuses the key with [`ErrorKind::Full`]; the layer answers 503, so the sender retries.
    /// Duplicates are still recognised; every *new* event is refused until keys expire.
    #[default]
    Refuse,
    /// Evicts the key of the same shard that is nearest to its expiry and not in flight. The event
    /// of that key would run again. Each eviction is counted (`tower_dedup_evicted_total`), and a
    /// warning is logged, once a minute at most.
    EvictOldest,
}

impl AtCapacity {
    /// Returns the time by which a row must be due, to go for a new one.
    fn until(self, now: u64) -> u64 {
        match self {
            Self::Refuse => now,
            Self::EvictOldest => END,
        }
    }
}

/// 128 bits that identify a key in one adapter.
pub(super) type Fingerprint = [u64; 2];

pub(super) fn fingerprint(hasher: SipHasher13, key: &DedupKey) -> Fingerprint {
    let hash = hasher.hash(key.as_bytes());
    [hash.h1, hash.h2]
}

/// Returns the number of one of `shards`, by the half of the fingerprint that the index does not use.
pub(super) fn shard_of(fingerprint: Fingerprint, shards: usize) -> usize {
    // The upper half of the product is below `shards`.
    let product = u128::from(fingerprint[1]) * (shards as u128);
    usize::try_from(product >> 64).unwrap_or_default()
}

/// Hashes a fingerprint, which is a keyed hash already, to its first half.
#[derive(Default)]
struct FirstHalf(u64);

impl Hasher for FirstHalf {
    fn write(&mut self, fingerprint: &[u8]) {
        if let Some((half, _)) = fingerprint.split_first_chunk() {
            self.0 = u64::from_ne_bytes(*half);
        }
    }

    /// The length of the fingerprint.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(super) struct Shard {
    capacity: usize,
    rows: HashMap<Fingerprint, Row, BuildHasherDefault<FirstHalf>>,
    /// When each row is due.
    order: BTreeSet<(u64, Fingerprint)>,
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, rows: HashMap::default(), order: BTreeSet::new() }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.values()
    }

    pub(super) fn get(&self, fingerprint: Fingerprint) -> Option<Row> {
        self.rows.get(&fingerprint).cloned()
    }

    /// Stores the row of a key, or removes it. A new row without room is refused.
    pub(super) fn put(
        &mut self,
        fingerprint: Fingerprint,
        row: Option<Row>,
        at_capacity: AtCapacity,
        now: u64,
    ) -> Result<Pressure, Error> {
        let old = self.rows.get(&fingerprint).map(Row::due);
        let new = row.as_ref().map(Row::due);
        let mut pressure = Pressure::default();
        if old.is_none() && new.is_some() {
            pressure = self.make_room(at_capacity, now)?;
        }
        if old != new {
            old.map(|due| self.order.remove(&(due, fingerprint)));
            new.map(|due| self.order.insert((due, fingerprint)));
        }
        match row {
            Some(row) => drop(self.rows.insert(fingerprint, row)),
            None => drop(self.remove(fingerprint)),
        }
        Ok(pressure)
    }

    /// Removes the row that is due first, if it is due by `until`.
    pub(super) fn remove_due(&mut self, until: u64) -> Option<Row> {
        self.order.first().filter(|(due, _)| *due <= until)?;
        let (_, fingerprint) = self.order.pop_first()?;
        self.remove(fingerprint)
    }

    fn make_room(&mut self, at_capacity: AtCapacity, now: u64) -> Result<Pressure, Error> {
        for _ in 0..PURGED_PER_INSERT {
            self.remove_due(now);
        }
        let mut evicted_age_ms = None;
        if self.rows.len() >= self.capacity {
            let first_seen_at = self.evict(at_capacity, now).ok_or_else(full)?.first_seen_at;
            evicted_age_ms = Some(now.saturating_sub(first_seen_at));
        }
        let nearly_full = self.rows.len() == 4 * self.capacity / 5;
        Ok(Pressure { evicted_age_ms, nearly_full })
    }

    /// Removes the row that is due first among those that are not in flight.
    fn evict(&mut self, at_capacity: AtCapacity, now: u64) -> Option<Row> {
        let due = self.order.iter().take_while(|(due, _)| *due <= at_capacity.until(now));
        let is_in_flight = |row: &Row| row.state(now) == Some(KeyState::InFlight);
        let mut due = due.filter(|(_, of)| !self.rows.get(of).is_some_and(is_in_flight));
        let first = due.next().copied()?;
        self.order.remove(&first);
        self.remove(first.1)
    }

    fn remove(&mut self, fingerprint: Fingerprint) -> Option<Row> {
        let row = self.rows.remove(&fingerprint);
        if self.rows.is_empty() && self.rows.capacity() > KEPT_ROWS {
            self.rows = HashMap::default();
        }
        row
    }
}

/// The error of a call whose new key has no room.
fn full() -> Error {
    Error::new(ErrorKind::Full, "claiming keys")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::hash::BuildHasher;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::row::Call;
    use super::*;
    use crate::adapter::terms::{CallTerms, Token};

    fn fingerprint_of(secret: u8, namespace: &str, id: &str) -> Fingerprint {
        let key = DedupKey::new(namespace, id).unwrap();
        fingerprint(SipHasher13::new_with_key(&[secret; 16]), &key)
    }

    #[test]
    fn fingerprint_depends_on_the_secret_and_on_where_the_namespace_ends() {
        let of = |namespace, id| fingerprint_of(1, namespace, id);
        assert_eq!(of("ab", "c"), of("ab", "c"));
        assert_ne!(of("ab", "c"), fingerprint_of(2, "ab", "c"));
        for (namespace, id) in [("a", "bc"), ("abc", "c"), ("ab", "C"), ("ab ", "c"), ("c", "ab")] {
            assert_ne!(of("ab", "c"), of(namespace, id), "{namespace} {id}");
        }
    }

    #[test]
    fn keys_spread_evenly_over_shards() {
        let mut counts = [0_u32; 7];
        for id in 0..7_000 {
            counts[shard_of(fingerprint_of(1, "n", &id.to_string()), 7)] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
        let most = [0, u64::MAX];
        assert_eq!((shard_of(most, 7), shard_of(most, 1)), (6, 0));
    }

    #[test]
    fn hash_of_a_fingerprint_is_its_first_half() {
        let hasher = BuildHasherDefault::<FirstHalf>::default();
        assert_eq!(hasher.hash_one([3_u64, 4]), 3);
    }

    proptest! {
        #[test]
        fn rows_come_in_the_order_in_which_they_are_due(
            steps in prop::collection::vec((0_u64..8, 1_u64..20, any::<bool>()), 1..200),
            until in 0_u64..25,
        ) {
            let (mut shard, mut times) = (Shard::new(8), BTreeMap::new());
            for (id, due, stays) in steps {
                let terms = CallTerms::on_claim(Token::random(), Duration::from_millis(due));
                let key = DedupKey::new("n", "a").unwrap();
                let mut row = None;
                if stays {
                    Call { key: &key, terms: &terms, now: 0 }.claim(&mut row);
                    times.insert(id, due);
                } else {
                    times.remove(&id);
                }
                shard.put([id; 2], row, AtCapacity::Refuse, 0).unwrap();
                prop_assert_eq!(shard.order.len(), times.len());
            }
            let mut expected: Vec<u64> = times.into_values().collect();
            expected.sort_unstable();
            let late = expected.split_off(expected.partition_point(|due| *due <= until));
            let mut purged = |until| -> Vec<u64> {
                std::iter::from_fn(|| shard.remove_due(until)).map(|row| row.due()).collect()
            };
            prop_assert_eq!(purged(until), expected);
            prop_assert_eq!(purged(END), late);
        }
    }
}
