//! The calls of operators to a store: entries, lists, statistics, `forget` and purges.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::contract::{DedupAdapter, StoreFuture};
use super::stored::StoredData;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The calls of operators to a store, and purges.
///
/// A reference to a `dyn MaintenanceAdapter` coerces to a `dyn DedupAdapter`, so
/// [`connect`](super::connect) returns an adapter for layers and for maintenance.
pub trait MaintenanceAdapter: DedupAdapter {
    /// Deletes at most `limit` keys that expired [`PURGE_GRACE`] ago or earlier, and returns how
    /// many it has deleted. A live lease is never deleted, nor is a lease that lapsed less than
    /// `PURGE_GRACE` ago.
    ///
    /// A call that deletes fewer keys than `limit` has left no key to delete, except those that
    /// another call has locked. A store may [delete expired keys by
    /// itself](super::contract::Abilities::expires_keys); then a call deletes nothing.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64>;

    /// Forgets one key: an operator lets its event run again. A live lease stays.
    ///
    /// An earlier run that still succeeds, or whose completion is under way, completes the key
    /// again.
    ///
    /// To run an event with two identities again, forget its key. If its second identity is
    /// complete for another key, the event stays a duplicate until you forget that identity, too.
    /// The record `same body` or `same event` of [`observe`](crate::observe) names it.
    ///
    /// An expired row stays in place of the key for [`PURGE_GRACE`] (in memory, until the store
    /// needs its room), so that a claim or a renewal which is still on its way has no effect. A
    /// late call must not undo a completion that came after it. Postgres and Redis do not repeat
    /// the call after a lost reply: the outcome is then unknown, and [`get`](Self::get) shows the
    /// key.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply>;

    /// Returns the state of one key and its stored data; `None` for an unknown or expired key.
    ///
    /// On Postgres, a key that an open transaction has inserted (`record_in`) is unknown until its
    /// COMMIT.
    ///
    /// Changes nothing. A stored response that cannot be read is no error: see
    /// [`Entry::response_is_unreadable`].
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>>;

    /// Returns the states of these keys, in their order, without stored data: as
    /// [`get`](Self::get), `None` for an unknown or expired key. A key may occur several times.
    ///
    /// The stores of this crate read all of them in one statement, or some of them at once; by
    /// default, it is one `get` after the other. Pass a few thousand keys: the call has the bound
    /// of one statement, and holds every entry in memory.
    ///
    /// Changes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Corrupt`] if one of the keys is unreadable: `get` says which. Else the
    /// store's own errors.
    fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
        Box::pin(async move {
            let mut entries = Vec::with_capacity(keys.len());
            for key in keys {
                let entry = self.get(key).await?;
                entries.push(entry.map(|entry| Entry { stored: None, ..entry }));
            }
            Ok(entries)
        })
    }

    /// Returns one portion of the keys that `filter` selects, at most `limit` of them (at least
    /// one), and where the next portion begins. The first call passes no cursor.
    ///
    /// A call reads a bounded part of the store, also if the filter selects few keys. The SQL
    /// adapters read 10,000 keys, in the order of the primary key, and the [cursor](Listing::next)
    /// is the last of them. A key that is written during the list may be absent; on Redis it may
    /// occur twice. A stuck key is not written, so the list contains it. An unreadable key is left
    /// out, and [counted](Listing::unreadable). Changes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] unless the store announces
    /// [`inspection`](super::contract::Abilities::inspection), which is the default;
    /// [`StoreErrorKind::Refused`] for a cursor of another store; else the store's own errors.
    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a str>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        let _ = (filter, after, limit);
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unsupported, "listing keys")) })
    }

    /// Returns how many keys are in each state. The numbers are exact for a small store, and
    /// estimates for a large one, of which a bounded part is read ([`Stats`]). Changes nothing.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn stats(&self) -> StoreFuture<'_, Stats>;

    /// Closes the adapter's connections, after all calls that are under way.
    ///
    /// Every later call on this handle and its clones fails with
    /// [`StoreErrorKind::Unavailable`], and opens no connection. A pool that
    /// you gave to the adapter stays open.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// How long an expired key stays in the store before [`MaintenanceAdapter::purge`] deletes it: one
/// hour.
///
/// The store's clock may be wrong for a while. Once the clock is right again, rows that still exist
/// are judged correctly. A clock that is ahead by less than an hour makes no purge delete a
/// key before its retention has ended.
pub const PURGE_GRACE: Duration = Duration::from_secs(3_600);

/// The state and the stored data of one key: the reply to
/// [`MaintenanceAdapter::get`]. The example `admin` shows it as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The state of the key, by the store's clock.
    pub state: KeyState,
    /// When the lease of a key in flight lapses, or has lapsed; `None` in the other states.
    pub lease_until: Option<SystemTime>,
    /// When a complete key became complete; `None` in the other states.
    pub completed_at: Option<SystemTime>,
    /// How often the key was claimed since it was first seen; 0 if a completion inserted it.
    pub attempts: u32,
    /// Whether the last claim was a takeover.
    pub takeover: bool,
    /// When the key was first seen.
    pub first_seen_at: SystemTime,
    /// When the retention of the key ends.
    pub expires_at: SystemTime,
    /// The data that is stored with a complete key; empty [`StoredData`] where nothing was stored.
    /// `None` if the key is not complete, or if the store holds no such data.
    pub stored: Option<Arc<StoredData>>,
    /// Whether a response is stored that cannot be read. `stored` is without the response then. A
    /// claim that fetches the response fails with [`StoreErrorKind::Corrupt`].
    pub response_is_unreadable: bool,
    /// The event's type, as the sender names it; `None` if the preset does not know it.
    pub event_type: Option<String>,
}

impl Entry {
    /// Returns an entry with one attempt, which was no takeover, and without what the other fields
    /// hold.
    #[must_use]
    pub const fn new(state: KeyState, first_seen_at: SystemTime, expires_at: SystemTime) -> Self {
        Self {
            state,
            lease_until: None,
            completed_at: None,
            attempts: 1,
            takeover: false,
            first_seen_at,
            expires_at,
            stored: None,
            response_is_unreadable: false,
            event_type: None,
        }
    }
}

/// A state of a key, as [`MaintenanceAdapter::list`] selects it and
/// [`Stats`] counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyState {
    /// A live lease holds the key.
    InFlight,
    /// The lease has lapsed: the handler's process died or lost the store. The next delivery takes
    /// over.
    Lapsed,
    /// The handler failed. The next delivery runs. A key that an operator
    /// [forgot](MaintenanceAdapter::forget) is released, too, and has expired.
    Released,
    /// Every further delivery is a duplicate.
    Complete,
}

/// The reply to [`MaintenanceAdapter::forget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForgetReply {
    /// The key was there, and is new now.
    Removed,
    /// There was no such key, or it had expired.
    Missing,
    /// The key is under a live lease and stays: otherwise two handlers could run.
    InFlight,
}

/// Selects keys. The default selects every key that has not expired.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListFilter {
    /// The state of the key; `None` selects every state.
    pub state: Option<KeyState>,
    /// The namespace of the key; `None` selects every namespace.
    pub namespace: Option<String>,
    /// A part of the key's id, as it is written; `None` selects every id.
    pub id_part: Option<String>,
    /// Selects keys that were first seen within this time, by the store's clock.
    pub since: Option<Duration>,
    /// Selects keys with more attempts than this.
    pub attempts_over: Option<u32>,
}

/// One portion of a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Listing {
    /// The selected keys of this portion, without their stored data. The list may be empty while
    /// [`next`](Self::next) is `Some`, because a call reads a bounded part of the store.
    pub keys: Vec<(DedupKey, Entry)>,
    /// A cursor: where the next portion begins; `None` after the last portion. Its text is the
    /// store's own, and means nothing to another store.
    pub next: Option<String>,
    /// How many keys of this portion are left out, because their data is unreadable.
    pub unreadable: u64,
}

/// The numbers of keys in a store.
///
/// [`MaintenanceAdapter::stats`] reads a bounded part of a large store.
/// `is_exact` is `false` then. [`list`](MaintenanceAdapter::list) reads every key.
///
/// The SQL adapters count the 100,000 keys that expired first, and the 100,000 keys that expire
/// last: with one retention, these were claimed last. A lapsed or released key between them is not
/// counted as such. On Postgres, [`rows`](Self::rows) and [`complete`](Self::complete) follow the
/// catalogue's estimate. On SQLite, each number is a lower bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Whether every key was counted, as in every small store.
    pub is_exact: bool,
    /// All stored keys, with expired keys that are not purged yet.
    pub rows: u64,
    /// Keys under a live lease.
    pub in_flight: u64,
    /// Keys whose lease has lapsed.
    pub lapsed: u64,
    /// Keys that were released and not claimed again.
    pub released: u64,
    /// Complete keys that have not expired.
    pub complete: u64,
    /// Expired keys that are not purged yet.
    pub expired: u64,
    /// The time since the oldest live lease was first claimed.
    pub oldest_in_flight: Option<Duration>,
    /// The time since the oldest lapsed lease lapsed.
    pub oldest_lapsed: Option<Duration>,
    /// The time since the oldest expired key expired: the purge lag, with
    /// [`PURGE_GRACE`]. An incomplete key expires with its lease, if that ends later.
    pub oldest_expired: Option<Duration>,
    /// The bytes of the table with its indexes, or of the file.
    pub bytes: Option<u64>,
}

#[cfg(any(feature = "redis", feature = "memory"))]
impl Stats {
    /// Counts the state of a row, and the time since the row was first seen, since its lease
    /// lapsed, or since it expired. `None` is an expired row.
    pub(super) fn count(&mut self, state: Option<KeyState>, age: Duration) {
        let (keys, oldest) = match state {
            Some(KeyState::InFlight) => (&mut self.in_flight, Some(&mut self.oldest_in_flight)),
            Some(KeyState::Lapsed) => (&mut self.lapsed, Some(&mut self.oldest_lapsed)),
            Some(KeyState::Released) => (&mut self.released, None),
            Some(KeyState::Complete) => (&mut self.complete, None),
            None => (&mut self.expired, Some(&mut self.oldest_expired)),
        };
        *keys += 1;
        if let Some(oldest) = oldest {
            *oldest = (*oldest).max(Some(age));
        }
    }
}

#[cfg(feature = "redis")]
impl Stats {
    /// Adds the numbers of another part of the same store. `scale` changes each number of keys, for
    /// an estimate.
    pub(super) fn add(&mut self, mut part: Self, scale: impl Fn(u64) -> u64) {
        for (sum, keys) in self.counts().into_iter().zip(part.counts()) {
            *sum = sum.saturating_add(scale(*keys));
        }
        self.oldest_in_flight = self.oldest_in_flight.max(part.oldest_in_flight);
        self.oldest_lapsed = self.oldest_lapsed.max(part.oldest_lapsed);
        self.oldest_expired = self.oldest_expired.max(part.oldest_expired);
    }

    fn counts(&mut self) -> [&mut u64; 6] {
        [
            &mut self.rows,
            &mut self.in_flight,
            &mut self.lapsed,
            &mut self.released,
            &mut self.complete,
            &mut self.expired,
        ]
    }
}

/// The name of a state: `in-flight`, `lapsed`, `released`, `complete`.
impl fmt::Display for KeyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InFlight => "in-flight",
            Self::Lapsed => "lapsed",
            Self::Released => "released",
            Self::Complete => "complete",
        })
    }
}

/// Reads the names of [`Display`](fmt::Display).
impl FromStr for KeyState {
    type Err = StoreError;

    fn from_str(name: &str) -> Result<Self, StoreError> {
        const NEEDED: &str = "reading a state: in-flight, lapsed, released or complete is needed";
        let states = [Self::InFlight, Self::Lapsed, Self::Released, Self::Complete];
        let state = states.into_iter().find(|state| state.to_string() == name);
        state.ok_or_else(|| StoreError::new(StoreErrorKind::Refused, NEEDED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_read_from_its_name() {
        for state in [KeyState::InFlight, KeyState::Lapsed, KeyState::Released, KeyState::Complete]
        {
            assert_eq!(state.to_string().parse::<KeyState>().unwrap(), state);
        }
        assert_eq!(KeyState::Released.to_string(), "released");
        for other in ["failed", "Released", "gone"] {
            assert_eq!(other.parse::<KeyState>().unwrap_err().kind(), StoreErrorKind::Refused);
        }
    }
}
