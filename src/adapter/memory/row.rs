//! What is known of one key, at full width and packed.

use std::sync::Arc;
use std::time::Duration;

use super::super::contract::{CallTerms, Seen};
use super::super::stored::StoredData;
use super::clock::ms;
use super::fingerprint::{Caller, Holder};
use crate::key::DedupKey;

/// Times are milliseconds of the adapter's [`Clock`](super::clock::Clock).
#[derive(Clone)]
pub(super) struct Row {
    pub(super) holder: Option<Holder>,
    pub(super) lease_until: u64,
    pub(super) attempts: u32,
    pub(super) takeover: bool,
    pub(super) first_seen_at: u64,
    pub(super) completed_at: Option<u64>,
    pub(super) expires_at: u64,
    /// Of a complete key.
    pub(super) kept: Option<Arc<StoredData>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Complete,
    Leased,
    /// Claimed, and the lease has run out.
    Lapsed,
    Released,
    /// As good as absent. Never a live lease.
    Expired,
}

impl Row {
    pub(super) fn leased(caller: Caller, terms: &CallTerms, now: u64) -> Self {
        Self {
            holder: Some(caller.into()),
            lease_until: now.saturating_add(ms(terms.lease())),
            attempts: 1,
            takeover: false,
            first_seen_at: now,
            completed_at: None,
            expires_at: expiry(terms, now),
            kept: None,
        }
    }

    pub(super) fn complete(caller: Caller, key: &DedupKey, terms: &CallTerms, now: u64) -> Self {
        let kept = terms.stored_data_for(key).map(Arc::new);
        Self { completed_at: Some(now), kept, ..Self::leased(caller, terms, now) }
    }

    pub(super) fn standing(&self, now: u64) -> Standing {
        let expired = self.expires_at <= now;
        match (self.completed_at, self.holder) {
            (None, Some(_)) if self.lease_until > now => Standing::Leased,
            _ if expired => Standing::Expired,
            (Some(_), _) => Standing::Complete,
            (None, Some(_)) => Standing::Lapsed,
            (None, None) => Standing::Released,
        }
    }

    /// Whether this caller holds the key, or has completed it.
    pub(super) fn is_of(&self, caller: &Caller) -> bool {
        self.holder.is_some_and(|holder| holder.is(caller))
    }

    /// Whether this caller has claimed the key, and neither completed nor released it.
    pub(super) fn is_claimed_by(&self, caller: &Caller) -> bool {
        self.completed_at.is_none() && self.is_of(caller)
    }

    /// From when on it can be purged: a lease may outlive the retention.
    pub(super) fn due(&self) -> u64 {
        match (self.completed_at, self.holder) {
            (None, Some(_)) => self.expires_at.max(self.lease_until),
            _ => self.expires_at,
        }
    }

    pub(super) fn seen(&self, now: u64) -> Seen {
        Seen::new(Duration::from_millis(now.saturating_sub(self.first_seen_at)))
    }
}

pub(super) fn expiry(terms: &CallTerms, now: u64) -> u64 {
    now.saturating_add(ms(terms.retention()))
}

/// A complete key with nothing kept, which is what almost every key is, in 24 bytes.
///
/// | bits of `high` and `low` | |
/// |---|---|
/// | 0..44 | `first_seen_at` |
/// | 44..88 | `expires_at`; all ones: never |
/// | 88..118 | from `first_seen_at` to `completed_at` |
/// | 118..126 | `attempts` |
/// | 126 | `takeover` |
/// | 127 | none of this: the row is kept at full width, and `tag` says where |
///
/// 44 bits of milliseconds are 557 years, 30 are twelve days. What does not fit stays wide.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    tag: u64,
    low: u64,
    high: u64,
}

const TIME: u32 = 44;
const TOOK: u32 = 30;
const ATTEMPTS: u32 = 8;
const NEVER: u64 = (1 << TIME) - 1;
const WIDE: u64 = 1 << 63;

/// Where a row is.
pub(super) enum Place {
    Packed(Row),
    /// In the shard's table of wide rows.
    Wide(usize),
}

impl Packed {
    pub(super) fn new(row: &Row) -> Option<Self> {
        let (Some(completed_at), Some(holder), None) = (row.completed_at, row.holder, &row.kept)
        else {
            return None;
        };
        let expires_at = match row.expires_at {
            u64::MAX => NEVER,
            at => fitting(at, TIME).filter(|at| *at != NEVER)?,
        };
        let took = completed_at.checked_sub(row.first_seen_at)?;
        let mut fields = Fields(0);
        fields.push(u64::from(row.takeover), 1);
        fields.push(fitting(row.attempts.into(), ATTEMPTS)?, ATTEMPTS);
        fields.push(fitting(took, TOOK)?, TOOK);
        fields.push(expires_at, TIME);
        fields.push(fitting(row.first_seen_at, TIME)?, TIME);
        let (high, low) = fields.halves();
        Some(Self { tag: holder.tag, low, high })
    }

    pub(super) const fn wide(index: usize) -> Self {
        Self { tag: index as u64, low: 0, high: WIDE }
    }

    pub(super) fn place(self) -> Place {
        if self.high & WIDE != 0 {
            // It was a `usize` when it came here.
            return Place::Wide(usize::try_from(self.tag).unwrap_or_default());
        }
        let mut fields = Fields(u128::from(self.high) << 64 | u128::from(self.low));
        let first_seen_at = fields.pop(TIME);
        let expires_at = Some(fields.pop(TIME)).filter(|at| *at != NEVER).unwrap_or(u64::MAX);
        let completed_at = first_seen_at + fields.pop(TOOK);
        Place::Packed(Row {
            holder: Some(Holder { token: None, tag: self.tag }),
            lease_until: completed_at,
            attempts: u32::try_from(fields.pop(ATTEMPTS)).unwrap_or_default(),
            takeover: fields.pop(1) == 1,
            first_seen_at,
            completed_at: Some(completed_at),
            expires_at,
            kept: None,
        })
    }
}

fn fitting(value: u64, bits: u32) -> Option<u64> {
    (value >> bits == 0).then_some(value)
}

/// Numbers of so many bits each: what was pushed last is popped first.
struct Fields(u128);

impl Fields {
    fn push(&mut self, value: u64, bits: u32) {
        self.0 = self.0 << bits | u128::from(value);
    }

    fn pop(&mut self, bits: u32) -> u64 {
        let value = self.0 & ((1 << bits) - 1);
        self.0 >>= bits;
        // No field is wider than 64 bits.
        u64::try_from(value).unwrap_or_default()
    }

    fn halves(&self) -> (u64, u64) {
        let half = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or_default();
        (half(self.0 >> 64), half(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> Row {
        Row {
            holder: Some(Holder { token: None, tag: u64::MAX }),
            lease_until: 5,
            attempts: 1,
            takeover: false,
            first_seen_at: 3,
            completed_at: Some(5),
            expires_at: 7,
            kept: None,
        }
    }

    /// `None` if it has to stay wide.
    fn packed(row: &Row) -> Option<Row> {
        match Packed::new(row)?.place() {
            Place::Packed(row) => Some(row),
            Place::Wide(index) => panic!("wide {index}"),
        }
    }

    #[test]
    fn a_row_comes_out_of_its_slot_as_it_went_in_or_does_not_go_in() {
        let times = [0, 1, 4_095, (1 << 44) - 2, (1 << 44) - 1, 1 << 44, u64::MAX - 1, u64::MAX];
        let tooks = [0, 1, (1 << 30) - 1, 1 << 30, u64::MAX];
        let attempts = [0, 1, 255, 256, u32::MAX];
        let mut fit = 0;
        for first_seen_at in times {
            for expires_at in times {
                for took in tooks {
                    for attempts in attempts {
                        for takeover in [false, true] {
                            let completed_at = first_seen_at.saturating_add(took);
                            let row = Row {
                                attempts,
                                takeover,
                                first_seen_at,
                                completed_at: Some(completed_at),
                                expires_at,
                                ..complete()
                            };
                            let Some(again) = packed(&row) else { continue };
                            fit += 1;
                            assert_eq!(again.first_seen_at, first_seen_at);
                            assert_eq!(again.completed_at, Some(completed_at));
                            assert_eq!(again.expires_at, expires_at);
                            assert_eq!((again.attempts, again.takeover), (attempts, takeover));
                            assert_eq!(again.holder.map(|holder| holder.tag), Some(u64::MAX));
                        }
                    }
                }
            }
        }
        // 0 to 2⁴⁴ − 1 are first seen, all but three expire, three durations, three counts.
        assert_eq!(fit, 5 * 5 * 3 * 3 * 2);
    }

    #[test]
    fn only_what_is_complete_and_plain_is_packed() {
        assert!(packed(&complete()).is_some());
        let kept = Some(Arc::new(StoredData::default()));
        for wide in [
            Row { completed_at: None, ..complete() },
            Row { holder: None, ..complete() },
            Row { kept, ..complete() },
            // A clock that ran backwards.
            Row { completed_at: Some(2), ..complete() },
        ] {
            assert!(packed(&wide).is_none());
        }
        assert!(matches!(Packed::wide(7).place(), Place::Wide(7)));
    }

    #[test]
    fn a_lease_is_due_when_both_it_and_the_retention_have_ended() {
        let held = Some(Holder { token: None, tag: 0 });
        let leased = Row { holder: held, lease_until: 10, completed_at: None, ..complete() };
        assert_eq!((leased.expires_at, leased.due()), (7, 10));
        assert_eq!(leased.standing(9), Standing::Leased);
        assert_eq!(leased.standing(10), Standing::Expired);
        assert_eq!(Row { holder: None, ..leased.clone() }.due(), 7);
        assert_eq!(Row { completed_at: Some(9), ..leased }.due(), 7);
    }
}
