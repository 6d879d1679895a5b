//! [`MemoryRow`]: the data of one key. [`MemoryCall`]: the operations on it.
//!
//! [`MemoryRow::state`] has the same rule as the rows of a database, which `sql::row` states. The
//! conformance suite tests both.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use super::super::maintenance::{Entry, ForgetReply, KeyState, Stats};
use super::super::replies::{ClaimReply, CompleteReply, RenewReply, Seen};
use super::super::stored::{Fetch, StoredData};
use super::super::terms::{CallTerms, Permanence, Token};
use super::clock::{after, ms, wall};

/// Times are milliseconds of the adapter's [`Clock`](super::clock::Clock).
#[derive(Clone, Default)]
pub(super) struct MemoryRow {
    /// `None` once the claim was released.
    token: Option<Token>,
    is_complete: bool,
    /// `completed_at` of a complete row; `lease_until` of any other row.
    ends_at: u64,
    first_seen_at: u64,
    expires_at: u64,
    attempts: u32,
    takeover: bool,
    /// Set only on complete rows.
    stored: Option<Arc<Kept>>,
}

impl MemoryRow {
    /// Returns `None` for an expired row, which is equivalent to a missing one. A live lease never
    /// expires.
    pub(super) fn state(&self, now: u64) -> Option<KeyState> {
        match (self.is_complete, self.token) {
            (false, Some(_)) if self.ends_at > now => Some(KeyState::InFlight),
            _ if self.expires_at <= now => None,
            (true, _) => Some(KeyState::Complete),
            (false, Some(_)) => Some(KeyState::Lapsed),
            (false, None) => Some(KeyState::Released),
        }
    }

    /// Returns the time from which the row can be purged: a lease may outlive the retention.
    pub(super) fn due(&self) -> u64 {
        let leased = !self.is_complete && self.token.is_some();
        if leased { self.expires_at.max(self.ends_at) } else { self.expires_at }
    }

    /// Returns `None` for an expired row.
    pub(super) fn entry(&self, now: u64) -> Option<Entry> {
        let state = self.state(now)?;
        let [first, expires, ends_at] =
            [self.first_seen_at, self.expires_at, self.ends_at].map(|at| wall(at, now));
        let mut entry = Entry::new(state, first, expires);
        (entry.attempts, entry.takeover) = (self.attempts, self.takeover);
        match state {
            KeyState::Complete => {
                entry.completed_at = Some(ends_at);
                entry.stored = self.fetched(Fetch::DigestAndResponse);
            }
            KeyState::InFlight | KeyState::Lapsed => entry.lease_until = Some(ends_at),
            KeyState::Released => {}
        }
        Some(entry)
    }

    /// Counts the row by its state.
    pub(super) fn add_to(&self, stats: &mut Stats, now: u64) {
        stats.rows += 1;
        let state = self.state(now);
        let at = match state {
            Some(KeyState::Lapsed) => self.ends_at,
            Some(_) => self.first_seen_at,
            None => self.due(),
        };
        stats.count(state, since(at, now));
    }

    /// Returns the row of a released or forgotten key without attempts. It has expired, and no
    /// renewal revives it.
    fn fence(now: u64) -> Self {
        Self { first_seen_at: now, expires_at: now, ..Self::default() }
    }

    /// Releases a row that is not under a live lease.
    pub(super) fn forget(row: &mut Option<Self>, now: u64) -> ForgetReply {
        match row.as_ref().and_then(|row| row.state(now)) {
            None => ForgetReply::Missing,
            Some(KeyState::InFlight) => ForgetReply::InFlight,
            Some(_) => {
                *row = Some(Self::fence(now));
                ForgetReply::Removed
            }
        }
    }

    fn fetched(&self, fetch: Fetch) -> Option<Arc<StoredData>> {
        StoredData::fetched(self.stored.as_ref().map(|kept| &kept.data), fetch)
    }

    fn is_by(&self, token: Token) -> bool {
        self.token == Some(token)
    }

    fn is_claimed_by(&self, token: Token) -> bool {
        !self.is_complete && self.is_by(token)
    }
}

fn since(at: u64, now: u64) -> Duration {
    Duration::from_millis(now.saturating_sub(at))
}

/// Stored data of a row. Its bytes are counted as long as it is kept.
struct Kept {
    data: Arc<StoredData>,
    /// The bytes of the data that all rows store.
    all: Arc<AtomicUsize>,
}

impl Kept {
    fn new(data: StoredData, all: &Arc<AtomicUsize>) -> Arc<Self> {
        let kept = Self { data: Arc::new(data), all: Arc::clone(all) };
        kept.all.fetch_add(kept.bytes(), Ordering::Relaxed);
        Arc::new(kept)
    }

    fn bytes(&self) -> usize {
        let Some(response) = &self.data.response else { return size_of::<StoredData>() };
        let headers = response.headers.iter().map(|(name, it)| name.as_str().len() + it.len());
        size_of::<StoredData>() + response.body.len() + headers.sum::<usize>()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

/// A call for one key. Its operations get the row of the key, and change it.
#[derive(Clone, Copy)]
pub(super) struct MemoryCall<'a> {
    pub(super) terms: &'a CallTerms,
    pub(super) now: u64,
    /// The bytes of the data that all rows store.
    pub(super) stored: &'a Arc<AtomicUsize>,
}

impl MemoryCall<'_> {
    pub(super) fn claim(self, row: &mut Option<MemoryRow>) -> ClaimReply {
        let (on_claim, token) = (self.is_on_claim(), self.terms.token());
        let past = Self { now: if on_claim { self.handled_at() } else { self.now }, ..self };
        let mut new = past.leased();
        if let Some(old) = row {
            (new.attempts, new.takeover, new.first_seen_at) = match old.state(self.now) {
                Some(KeyState::Complete) if on_claim && old.is_by(token) => {
                    // A completion without a claim has counted no attempt.
                    return ClaimReply::first(old.attempts.max(1), old.takeover);
                }
                Some(KeyState::Complete) => {
                    let mut seen = Seen::new(since(old.first_seen_at, self.now));
                    seen.stored = old.fetched(self.terms.fetch());
                    return ClaimReply::Duplicate(seen);
                }
                _ if !on_claim && old.is_claimed_by(token) => {
                    (old.attempts, old.takeover, old.first_seen_at)
                }
                Some(KeyState::InFlight) => return ClaimReply::InFlight,
                Some(state) => {
                    let takeover = state == KeyState::Lapsed;
                    (old.attempts.saturating_add(1), takeover, old.first_seen_at)
                }
                None => (1, false, new.first_seen_at),
            };
        }
        if on_claim {
            past.mark_complete(&mut new);
        }
        let reply = ClaimReply::first(new.attempts, new.takeover);
        *row = Some(new);
        reply
    }

    pub(super) fn renew(self, row: &mut Option<MemoryRow>) -> RenewReply {
        match row {
            Some(row) if row.is_claimed_by(self.terms.token()) => {
                row.ends_at = self.leased().ends_at;
            }
            Some(_) => return RenewReply::Lost,
            None => *row = Some(self.leased()),
        }
        RenewReply::Held
    }

    pub(super) fn complete(self, row: &mut Option<MemoryRow>) -> CompleteReply {
        // An expired complete row counts as missing, and so does a fence. Another incomplete row
        // does not.
        let is_known = |row: &MemoryRow| {
            if row.is_complete { row.expires_at > self.now } else { row.attempts > 0 }
        };
        match row.as_mut().filter(|row| is_known(row)) {
            Some(row) => {
                if !row.is_complete {
                    self.mark_complete(row);
                }
                match (row.is_by(self.terms.token()), row.attempts) {
                    // Repeated: this token has inserted the row.
                    (true, 0) => CompleteReply::Inserted,
                    (true, _) => CompleteReply::Held,
                    (false, _) => CompleteReply::LeaseLost,
                }
            }
            None => {
                let mut new = MemoryRow { attempts: 0, ..self.leased() };
                self.mark_complete(&mut new);
                *row = Some(new);
                CompleteReply::Inserted
            }
        }
    }

    pub(super) fn release(self, row: &mut Option<MemoryRow>) {
        let on_claim = self.is_on_claim();
        let held = row.get_or_insert_with(|| MemoryRow::fence(self.now));
        if held.is_complete == on_claim && held.is_by(self.terms.token()) {
            if on_claim { *held = MemoryRow::fence(self.now) } else { held.token = None }
        }
    }

    fn is_on_claim(self) -> bool {
        self.terms.permanence() == Permanence::OnClaim
    }

    /// Returns when the event of a claim was handled, by the adapter's clock.
    fn handled_at(self) -> u64 {
        let ago = |at| SystemTime::now().duration_since(at).unwrap_or_default();
        self.now.saturating_sub(ms(self.terms.handled_at().map_or(Duration::ZERO, ago)))
    }

    fn leased(self) -> MemoryRow {
        MemoryRow {
            token: Some(self.terms.token()),
            ends_at: after(self.now, self.terms.lease()),
            first_seen_at: self.now,
            expires_at: after(self.now, self.terms.retention()),
            attempts: 1,
            ..MemoryRow::default()
        }
    }

    /// Marks the row complete. A row that has expired by now is remembered for another retention.
    fn mark_complete(self, row: &mut MemoryRow) {
        row.is_complete = true;
        row.ends_at = self.now;
        row.stored = self.terms.stored_data().map(|data| Kept::new(data, self.stored));
        if row.expires_at <= self.now {
            row.expires_at = after(self.now, self.terms.retention());
        }
    }
}
