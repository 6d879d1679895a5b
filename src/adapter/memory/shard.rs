//! One shard of the table: its rows, and in which order they expire.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::super::contract::{Receipt, Seen, Token};
use super::super::kept::Kept;
use crate::key::DedupKey;

/// A shard is worth its own lock from this many keys on.
pub(super) const SHARD_KEYS: usize = 1_024;

#[derive(Default)]
pub(super) struct Shard {
    pub(super) slots: HashMap<DedupKey, Slot>,
    /// Every key of `slots` under its `due`, and perhaps under earlier ones too: what has moved on
    /// or gone is passed over when its time comes, which is cheaper than to look for it earlier.
    by_due: BTreeMap<u64, VecDeque<DedupKey>>,
    /// How many keys `by_due` names.
    pub(super) named: usize,
}

impl Shard {
    pub(super) fn put(&mut self, key: &DedupKey, slot: Slot) {
        match self.slots.get_mut(key) {
            Some(old) if old.expires_at == slot.expires_at => *old = Slot { due: old.due, ..slot },
            _ => {
                let due = slot.due;
                self.slots.insert(key.clone(), slot);
                self.name(due, key.clone());
            }
        }
    }

    pub(super) fn remove(&mut self, key: &DedupKey) {
        self.slots.remove(key);
    }

    /// Puts a key back to what it was before a call that failed.
    pub(super) fn restore(&mut self, key: &DedupKey, slot: Option<Slot>) {
        match slot {
            Some(slot) => {
                let due = slot.due;
                self.slots.insert(key.clone(), slot);
                self.name(due, key.clone());
            }
            None => self.remove(key),
        }
    }

    fn name(&mut self, due: u64, key: DedupKey) {
        self.by_due.entry(due).or_default().push_back(key);
        self.named += 1;
        // Keys that are claimed again and again leave their names behind.
        if self.named > 2 * self.slots.len() + SHARD_KEYS {
            self.by_due.clear();
            self.named = self.slots.len();
            for (key, slot) in &self.slots {
                self.by_due.entry(slot.due).or_default().push_back(key.clone());
            }
        }
    }

    /// The next name that still stands, if it is due by `until`. It is taken out of the index.
    fn next_due(&mut self, until: u64) -> Option<DedupKey> {
        loop {
            let mut names = self.by_due.first_entry()?;
            let due = *names.key();
            if due > until {
                return None;
            }
            let Some(key) = names.get_mut().pop_front() else {
                names.remove();
                continue;
            };
            self.named -= 1;
            if self.slots.get(&key).is_some_and(|slot| slot.due == due) {
                return Some(key);
            }
        }
    }

    /// Removes up to `limit` expired keys.
    pub(super) fn purge(&mut self, limit: u32, now: u64) -> u32 {
        let mut purged = 0;
        while purged < limit
            && let Some(key) = self.next_due(now)
        {
            match self.slots.get_mut(&key) {
                // It outlives its retention: look again when its lease lapses.
                Some(slot) if slot.standing(now) != Standing::Expired => {
                    slot.due = slot.lease_until.max(now.saturating_add(1));
                    let due = slot.due;
                    self.name(due, key);
                }
                _ => {
                    self.slots.remove(&key);
                    purged += 1;
                }
            }
        }
        purged
    }

    /// Removes the key nearest to its expiry that no handler is running.
    pub(super) fn evict(&mut self, now: u64) -> bool {
        let mut spared = Vec::new();
        let evicted = loop {
            let Some(key) = self.next_due(u64::MAX) else { break false };
            match self.slots.get(&key) {
                Some(slot) if slot.standing(now) == Standing::Leased => {
                    spared.push((slot.due, key));
                }
                _ => {
                    self.slots.remove(&key);
                    break true;
                }
            }
        };
        for (due, key) in spared {
            self.name(due, key);
        }
        evicted
    }
}

/// Times are milliseconds of the adapter's [`Clock`].
#[derive(Clone)]
pub(super) struct Slot {
    pub(super) token: Option<Token>,
    pub(super) lease_until: u64,
    pub(super) attempts: u32,
    pub(super) takeover: bool,
    pub(super) first_seen_at: u64,
    pub(super) completed_at: Option<u64>,
    pub(super) expires_at: u64,
    /// When to look whether it can be purged.
    pub(super) due: u64,
    /// Of a complete key.
    pub(super) kept: Option<Arc<Kept>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Complete,
    Leased,
    /// Claimed, and the lease has run out.
    Lapsed,
    Released,
    /// As good as absent. Never a live lease.
    Expired,
}

impl Slot {
    pub(super) fn leased(receipt: &Receipt, now: u64) -> Self {
        let expires_at = expiry(receipt, now);
        Self {
            token: Some(receipt.token()),
            lease_until: now.saturating_add(ms(receipt.lease())),
            attempts: 1,
            takeover: false,
            first_seen_at: now,
            completed_at: None,
            expires_at,
            due: expires_at,
            kept: None,
        }
    }

    pub(super) fn complete(key: &DedupKey, receipt: &Receipt, now: u64) -> Self {
        let kept = receipt.kept_for(key).map(Arc::new);
        Self { lease_until: now, completed_at: Some(now), kept, ..Self::leased(receipt, now) }
    }

    pub(super) fn standing(&self, now: u64) -> Standing {
        let expired = self.expires_at <= now;
        match (self.completed_at, self.token) {
            (None, Some(_)) if self.lease_until > now => Standing::Leased,
            _ if expired => Standing::Expired,
            (Some(_), _) => Standing::Complete,
            (None, Some(_)) => Standing::Lapsed,
            (None, None) => Standing::Released,
        }
    }

    pub(super) fn seen(&self, now: u64) -> Seen {
        Seen::new(Duration::from_millis(now.saturating_sub(self.first_seen_at)))
    }
}

/// Milliseconds since the adapter was made: monotonic, so that a changed wall clock neither
/// expires keys nor lapses leases.
pub(super) struct Clock {
    pub(super) start: Instant,
    pub(super) skew_ms: AtomicU64,
}

impl Clock {
    pub(super) fn now(&self) -> u64 {
        ms(self.start.elapsed()).saturating_add(self.skew_ms.load(Ordering::Relaxed))
    }

    pub(super) fn wall(&self, at: u64) -> SystemTime {
        let (now, wall) = (self.now(), SystemTime::now());
        let moved = if at >= now {
            wall.checked_add(Duration::from_millis(at - now))
        } else {
            wall.checked_sub(Duration::from_millis(now - at))
        };
        moved.unwrap_or(wall)
    }
}

pub(super) fn expiry(receipt: &Receipt, now: u64) -> u64 {
    now.saturating_add(ms(receipt.retention()))
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
