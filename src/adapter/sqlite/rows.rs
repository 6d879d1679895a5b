//! What the rows mean, and what SQLite's errors do.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::Row;
use sqlx::error::DatabaseError;
use sqlx::sqlite::SqliteRow;

use super::super::contract::{Claimed, Entry, EntryState, Recorded, Seen, Token};
use super::super::sql;
use crate::error::Error;
use crate::key::DedupKey;

/// A row, as the read statement answers it. Times are milliseconds since the Unix epoch.
pub(super) struct Stored {
    token: Option<Vec<u8>>,
    attempts: i64,
    takeover: bool,
    first_seen_at: i64,
    completed_at: Option<i64>,
    expires_at: i64,
    lease_until: Option<i64>,
    now: i64,
}

enum Standing {
    Complete,
    Leased,
    Lapsed,
    Released,
    Expired,
}

impl Stored {
    pub(super) fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            token: row.try_get("token")?,
            attempts: row.try_get("attempts")?,
            takeover: row.try_get("takeover")?,
            first_seen_at: row.try_get("first_seen_at")?,
            completed_at: row.try_get("completed_at")?,
            expires_at: row.try_get("expires_at")?,
            lease_until: row.try_get("lease_until")?,
            now: row.try_get("now")?,
        })
    }

    /// The rule of [`schema`](super::schema), in the same words.
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

    pub(super) fn is_by(&self, token: Token) -> bool {
        self.token.as_deref() == Some(token.as_bytes())
    }

    fn seen(&self) -> Seen {
        let age = u64::try_from(self.now.saturating_sub(self.first_seen_at)).unwrap_or_default();
        Seen::new(Duration::from_millis(age))
    }

    pub(super) fn entry(&self) -> Option<Entry> {
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
pub(super) trait Grant {
    /// The answer that a stored row gives without a write, if it does.
    fn known(stored: &Stored, mine: Token) -> Option<Self>
    where
        Self: Sized;
    fn granted(attempt: u32, takeover: bool) -> Self;
    fn in_flight() -> Self;
}

impl Grant for Recorded {
    fn known(stored: &Stored, mine: Token) -> Option<Self> {
        match stored.standing() {
            Standing::Complete if stored.is_by(mine) => Some(Self::First),
            Standing::Complete => Some(Self::Duplicate(stored.seen())),
            Standing::Leased => Some(Self::InFlight),
            Standing::Lapsed | Standing::Released | Standing::Expired => None,
        }
    }

    fn granted(_: u32, _: bool) -> Self {
        Self::First
    }

    fn in_flight() -> Self {
        Self::InFlight
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
}

/// Each returned row with the place of its key.
pub(super) fn matched<'r>(
    keys: &[DedupKey],
    rows: &'r [SqliteRow],
) -> Result<Vec<(usize, &'r SqliteRow)>, sqlx::Error> {
    let places: HashMap<(&str, &str), usize> =
        keys.iter().enumerate().map(|(place, key)| ((key.namespace(), key.id()), place)).collect();
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        let name = (row.try_get("namespace")?, row.try_get("id")?);
        if let Some(place) = places.get(&name) {
            found.push((*place, row));
        }
    }
    Ok(found)
}

pub(super) fn store_error(context: &'static str, error: sqlx::Error) -> Error {
    sql::store_error(context, error, is_refusal)
}

// Result codes of SQLite: <https://sqlite.org/rescode.html>.
pub(super) const BUSY: i64 = 5;
pub(super) const LOCKED: i64 = 6;
const READONLY: i64 = 8;
const FULL: i64 = 13;
const CANTOPEN: i64 = 14;

/// Whether a statement that ends with this has surely changed nothing.
fn is_refusal(answer: &dyn DatabaseError) -> bool {
    matches!(primary_code(answer), Some(BUSY | LOCKED | READONLY | FULL | CANTOPEN))
}

pub(super) fn primary_code(answer: &dyn DatabaseError) -> Option<i64> {
    let extended = answer.code()?.parse::<i64>().ok()?;
    Some(extended & 0xff)
}

/// The far end of time that this platform can name, for a time beyond it.
fn wall(ms: i64) -> SystemTime {
    let since = Duration::from_millis(u64::try_from(ms).unwrap_or_default());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}
