//! What a row means, and what it answers.
//!
//! A row is
//!
//! - *complete* if `completed_at` is set,
//! - *leased* if it is not complete, `token` is set and `lease_until` is in the future,
//! - *lapsed* if `lease_until` has passed, *released* if `token` is null,
//! - *expired* if `expires_at` has passed and it is not leased.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::super::replies::{Claimed, Completed, Entry, EntryState, Released, Renewed, Seen};
use super::super::stored::{StoredData, StoredResponse};
use super::super::terms::{CallTerms, Token};
use crate::error::Error;
use crate::key::DedupKey;

/// A row, as a statement answers it. Times are milliseconds since the Unix epoch.
pub(in crate::adapter) struct Stored {
    pub(in crate::adapter) token: Option<[u8; 16]>,
    pub(in crate::adapter) attempts: i64,
    pub(in crate::adapter) takeover: bool,
    pub(in crate::adapter) first_seen_at: i64,
    pub(in crate::adapter) completed_at: Option<i64>,
    pub(in crate::adapter) expires_at: i64,
    pub(in crate::adapter) lease_until: Option<i64>,
    pub(in crate::adapter) now: i64,
}

/// What a complete row has kept, as a statement answers it.
pub(in crate::adapter) struct KeptRow {
    pub(in crate::adapter) payload_sha256: Option<Vec<u8>>,
    pub(in crate::adapter) status: Option<i64>,
    pub(in crate::adapter) headers: Option<String>,
    pub(in crate::adapter) body: Option<Vec<u8>>,
}

impl KeptRow {
    pub(in crate::adapter) fn kept(self) -> Result<StoredData, Error> {
        // Of another length, it is no SHA-256, and is compared with none.
        let payload = self.payload_sha256.and_then(|digest| digest.try_into().ok());
        let response = match (self.status, self.headers, self.body) {
            (Some(status), Some(headers), Some(body)) => {
                Some(Arc::new(StoredResponse::from_stored(status, &headers, body)?))
            }
            _ => None,
        };
        Ok(StoredData::new(payload, response))
    }
}

enum Standing {
    Complete,
    Leased,
    Lapsed,
    Released,
    Expired,
}

impl Stored {
    /// The rule above; the statements say the same in SQL.
    fn standing(&self) -> Standing {
        let held = self.token.is_some();
        let live = self.lease_until.is_some_and(|until| until > self.now);
        match (self.completed_at, held) {
            (None, true) if live => Standing::Leased,
            _ if self.expires_at <= self.now => Standing::Expired,
            (Some(_), _) => Standing::Complete,
            (None, true) => Standing::Lapsed,
            (None, false) => Standing::Released,
        }
    }

    pub(in crate::adapter) fn is_by(&self, token: Token) -> bool {
        self.token.as_ref() == Some(token.as_bytes())
    }

    /// Whether somebody holds it, who is told by nothing else.
    pub(in crate::adapter) fn is_leased(&self) -> bool {
        matches!(self.standing(), Standing::Leased)
    }

    fn seen(&self) -> Seen {
        let age = u64::try_from(self.now.saturating_sub(self.first_seen_at)).unwrap_or_default();
        Seen::new(Duration::from_millis(age))
    }

    pub(in crate::adapter) fn entry(&self) -> Option<Entry> {
        let state = match self.standing() {
            Standing::Expired => return None,
            Standing::Complete => {
                EntryState::Complete { completed_at: wall(self.completed_at.unwrap_or_default()) }
            }
            Standing::Leased | Standing::Lapsed => {
                EntryState::InFlight { lease_until: wall(self.lease_until.unwrap_or_default()) }
            }
            Standing::Released => EntryState::Released,
        };
        let attempts = u32::try_from(self.attempts).unwrap_or(u32::MAX);
        let entry = Entry::new(state, wall(self.first_seen_at), wall(self.expires_at));
        Some(entry.with_attempts(attempts, self.takeover))
    }
}

/// The answer to a claim or a record.
pub(in crate::adapter) trait Grant {
    /// The answer that a stored row gives without a write, if it does.
    fn known(stored: &Stored, mine: Token) -> Option<Self>
    where
        Self: Sized;
    fn granted(attempt: u32, takeover: bool) -> Self;
    fn in_flight() -> Self;
    /// What stands in the row of a key that was just granted.
    fn left_behind(&self, terms: &CallTerms) -> Stored;
}

/// The reply to a claim under `OnClaim`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::adapter) enum Recorded {
    First { attempt: u32, takeover: bool },
    Duplicate(Seen),
    InFlight,
}

impl From<Recorded> for Claimed {
    fn from(recorded: Recorded) -> Self {
        match recorded {
            Recorded::First { attempt, takeover } => Self::first(attempt, takeover),
            Recorded::Duplicate(seen) => Self::Duplicate(seen),
            Recorded::InFlight => Self::InFlight,
        }
    }
}

/// A row written at this very moment.
fn written(terms: &CallTerms, completed_at: Option<i64>, lease_until: Option<i64>) -> Stored {
    Stored {
        token: Some(*terms.token().as_bytes()),
        attempts: 1,
        takeover: false,
        first_seen_at: 0,
        completed_at,
        expires_at: terms.retention_ms(),
        lease_until,
        now: 0,
    }
}

impl Grant for Recorded {
    fn known(stored: &Stored, mine: Token) -> Option<Self> {
        match stored.standing() {
            Standing::Complete if stored.is_by(mine) => {
                // A completion that was inserted counts no attempt.
                let attempt = u32::try_from(stored.attempts).unwrap_or(u32::MAX).max(1);
                Some(Self::First { attempt, takeover: stored.takeover })
            }
            Standing::Complete => Some(Self::Duplicate(stored.seen())),
            Standing::Leased => Some(Self::InFlight),
            Standing::Lapsed | Standing::Released | Standing::Expired => None,
        }
    }

    fn granted(attempt: u32, takeover: bool) -> Self {
        Self::First { attempt, takeover }
    }

    fn in_flight() -> Self {
        Self::InFlight
    }

    fn left_behind(&self, terms: &CallTerms) -> Stored {
        let stored = written(terms, Some(0), None);
        match *self {
            // Another call with the same token is told the same.
            Self::First { attempt, takeover } => {
                Stored { attempts: attempt.into(), takeover, ..stored }
            }
            _ => stored,
        }
    }
}

impl Grant for Claimed {
    fn known(stored: &Stored, mine: Token) -> Option<Self> {
        match stored.standing() {
            Standing::Complete => Some(Self::Duplicate(stored.seen())),
            Standing::Leased if !stored.is_by(mine) => Some(Self::InFlight),
            _ => None,
        }
    }

    fn granted(attempt: u32, takeover: bool) -> Self {
        Self::first(attempt, takeover)
    }

    fn in_flight() -> Self {
        Self::InFlight
    }

    fn left_behind(&self, terms: &CallTerms) -> Stored {
        written(terms, None, Some(terms.lease_ms()))
    }
}

/// The keys at these places.
pub(in crate::adapter) fn at(keys: &[DedupKey], places: &[usize]) -> Vec<DedupKey> {
    places.iter().map(|place| keys[*place].clone()).collect()
}

/// The places that have no answer yet.
pub(in crate::adapter) fn open_places<T>(answers: &[Option<T>]) -> Vec<usize> {
    (0..answers.len()).filter(|place| answers[*place].is_none()).collect()
}

pub(in crate::adapter) fn released(done: Vec<bool>) -> Vec<Released> {
    done.into_iter().map(|done| if done { Released::Released } else { Released::NotHeld }).collect()
}

pub(in crate::adapter) fn renewed(held: Vec<bool>) -> Vec<Renewed> {
    held.into_iter().map(|held| if held { Renewed::Held } else { Renewed::Lost }).collect()
}

/// What a completion answers that returned a row: one that it inserted has no attempts.
pub(in crate::adapter) fn completed(attempts: i64, held: bool) -> Completed {
    match (attempts, held) {
        (0, _) => Completed::Inserted,
        (_, true) => Completed::Held,
        (_, false) => Completed::LeaseLost,
    }
}

/// What a completion answers that found the key complete, and so changed nothing. None if the row
/// says otherwise by now: somebody has changed it since.
pub(in crate::adapter) fn completed_before(
    stored: Option<&Stored>,
    mine: Token,
) -> Option<Completed> {
    let stored = stored.filter(|stored| matches!(stored.standing(), Standing::Complete))?;
    Some(if stored.is_by(mine) { Completed::Held } else { Completed::LeaseLost })
}

/// The far end of time that this platform can name, for a time beyond it.
fn wall(ms: i64) -> SystemTime {
    let since = Duration::from_millis(u64::try_from(ms).unwrap_or_default());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}
