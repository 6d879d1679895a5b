//! The traits that a store implements, and the values they exchange.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::stored::{StoredData, StoredResponse};
use crate::error::Error;
use crate::key::DedupKey;

/// The record contract: remember a key for a time, tell the first from a duplicate.
///
/// All that the `on_arrival` ledger needs. The keys of a call are distinct and sorted; answers are
/// one per key, in the order of the keys; each key is on its own, so a store without multi-key
/// operations may go through them one by one, in the order given.
///
/// # Cancel safety
///
/// The layer drops a call that outlives its `store_timeout`; its outcome is then unknown, and is
/// undone by token in the background.
///
/// # Example
///
/// A whole adapter, if a small one:
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Mutex;
/// use std::time::Duration;
/// use tower_dedup::adapter::{DedupAdapter, CallTerms, Recorded, Released, Seen, Token};
/// use tower_dedup::{DedupKey, Error};
///
/// /// Remembers everything, for ever.
/// #[derive(Default)]
/// struct Forever(Mutex<HashMap<DedupKey, Token>>);
///
/// impl DedupAdapter for Forever {
///     async fn record(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Recorded>, Error> {
///         let mut seen = self.0.lock().unwrap();
///         Ok(keys
///             .iter()
///             .map(|key| match *seen.entry(key.clone()).or_insert(terms.token()) {
///                 token if token == terms.token() => Recorded::First,
///                 _ => Recorded::Duplicate(Seen::new(Duration::ZERO)),
///             })
///             .collect())
///     }
///
///     async fn unrecord(&self, keys: &[DedupKey], terms: &CallTerms) -> Result<Vec<Released>, Error> {
///         let mut seen = self.0.lock().unwrap();
///         Ok(keys
///             .iter()
///             .map(|key| match seen.get(key) {
///                 Some(token) if *token == terms.token() => {
///                     seen.remove(key);
///                     Released::Released
///                 }
///                 _ => Released::NotHeld,
///             })
///             .collect())
///     }
/// }
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let adapter = Forever::default();
/// let keys = [DedupKey::new("acme", "evt_1").unwrap()];
/// let terms = CallTerms::new(Token::random(), Duration::from_secs(60));
/// assert_eq!(adapter.record(&keys, &terms).await.unwrap(), [Recorded::First]);
/// // The same token again: the answer was lost, and is given again.
/// assert_eq!(adapter.record(&keys, &terms).await.unwrap(), [Recorded::First]);
/// let other = CallTerms::new(Token::random(), Duration::from_secs(60));
/// assert!(matches!(adapter.record(&keys, &other).await.unwrap()[..], [Recorded::Duplicate(_)]));
/// # });
/// ```
pub trait DedupAdapter: Send + Sync + 'static {
    /// Records each key as complete for the terms's retention, unless it is complete already or
    /// in flight.
    fn record(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Recorded>, Error>> + Send;

    /// Undoes a `record` of this token. A key that another token recorded is left alone.
    fn unrecord(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Released>, Error>> + Send;
}

/// The lease contract: claim a key, renew the claim while the handler runs, then complete or
/// release it.
///
/// The keys of a claim are distinct and sorted, those of other calls distinct. Answers are one per
/// key, in the order of the keys.
pub trait LeaseAdapter: DedupAdapter {
    /// Claims each key that is neither complete nor under a live lease of another token.
    ///
    /// A claim sets `lease_until` and, except when it is repeated with its token, counts an
    /// attempt. A key whose retention has ended is as new.
    fn claim(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Claimed>, Error>> + Send;

    /// Moves `lease_until` of every key that this token holds; a lapsed or missing one is revived
    /// if nobody took it.
    fn renew(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Renewed>, Error>> + Send;

    /// Marks each key complete, whoever holds its lease by now; a missing one is inserted.
    ///
    /// The retention counts from the claim. Only where it has ended by now does it count anew: a
    /// completion is never expired at birth.
    fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Completed>, Error>> + Send;

    /// Gives up the lease of every key that this token holds and has not completed. The key's
    /// attempts are kept.
    fn release(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Released>, Error>> + Send;
}

/// How long an expired key stays in the store before [`MaintenanceAdapter::purge`] deletes it: one hour.
///
/// The store's clock says whether a key has expired, and may be wrong for a while. Once it is right
/// again, so is its judgement of every row that is still there. A clock that is ahead by less than an
/// hour makes no purge delete a key before its retention has ended.
pub const PURGE_GRACE: Duration = Duration::from_secs(3_600);

/// What an operator and the purger do with a store.
pub trait MaintenanceAdapter: Send + Sync + 'static {
    /// Deletes at most `limit` keys that expired [`PURGE_GRACE`] ago or earlier, and returns how many
    /// it deleted. Fewer than `limit` means that there are no more. A live lease is never among them,
    /// nor is one that lapsed less than `PURGE_GRACE` ago.
    ///
    /// # Errors
    ///
    /// Whatever the store answers; nothing is lost, and the next call goes on. The SQL adapters
    /// refuse ([`ErrorKind::Refused`](crate::ErrorKind::Refused)) while the store's clock is ahead by
    /// more than `PURGE_GRACE` of where it was at the last purge in this process plus the time that
    /// has passed since. They accept a clock that has stayed there for `PURGE_GRACE`.
    fn purge(&self, limit: u32) -> impl Future<Output = Result<u64, Error>> + Send;

    /// Deletes one key, so that its event can be delivered again; refused under a live lease.
    fn forget(&self, key: &DedupKey) -> impl Future<Output = Result<Forgotten, Error>> + Send;

    /// What the store knows of one key; `None` if it knows nothing, or only what has expired.
    fn get(&self, key: &DedupKey) -> impl Future<Output = Result<Option<Entry>, Error>> + Send;

    /// How many keys are stored, expired ones that are not purged yet included.
    fn count(&self) -> impl Future<Output = Result<u64, Error>> + Send;

    /// Closes connections, after everything that is under way.
    ///
    /// Every later call fails with [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable), and
    /// opens no connection. That holds for this handle and its clones, also where the connections
    /// are those of a pool of yours, which stays open.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

/// Names one claim or record: 128 random bits that the caller makes *before* the call, so that a
/// call whose answer was lost can be repeated or undone.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// A token that nobody else has.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// The token's bytes, for a store.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl From<[u8; 16]> for Token {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({:08x}..)", u128::from_be_bytes(self.0) >> 96)
    }
}

/// The terms of a call to a store: who asks, for how long, and what is to be kept with the keys.
///
/// Cloning is cheap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTerms {
    token: Token,
    retention: Duration,
    lease: Duration,
    payloads: Option<Payloads>,
    response: Option<Arc<StoredResponse>>,
}

/// The SHA-256 of each key's payload, sorted by key.
pub(crate) type Payloads = Arc<[(DedupKey, [u8; 32])]>;

impl CallTerms {
    /// The terms of a `record`: no lease.
    #[must_use]
    pub const fn new(token: Token, retention: Duration) -> Self {
        Self { token, retention, lease: Duration::ZERO, payloads: None, response: None }
    }

    /// Adds the lease that a claim or a renewal asks for.
    #[must_use]
    pub const fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Adds the SHA-256 of each key's payload, to be kept with it by a store that can
    /// [`Recall`](super::Recall).
    #[must_use]
    pub fn with_payloads(self, payloads: impl IntoIterator<Item = (DedupKey, [u8; 32])>) -> Self {
        let mut payloads: Vec<_> = payloads.into_iter().collect();
        payloads.sort_unstable();
        self.with_sorted_payloads(payloads.into())
    }

    pub(crate) fn with_sorted_payloads(mut self, payloads: Payloads) -> Self {
        self.payloads = Some(payloads);
        self
    }

    /// Adds the handler's response, to be kept with every key of a completion by a store that can
    /// [`Recall`](super::Recall).
    #[must_use]
    pub fn with_response(mut self, response: Arc<StoredResponse>) -> Self {
        self.response = Some(response);
        self
    }

    /// What a store that can [`Recall`](super::Recall) keeps with this key once it is complete;
    /// `None` if there is nothing to keep.
    #[must_use]
    pub fn stored_data_for(&self, key: &DedupKey) -> Option<StoredData> {
        let payload = self.payloads.as_deref().and_then(|payloads| {
            let place = payloads.binary_search_by(|(of, _)| of.cmp(key)).ok()?;
            Some(payloads[place].1)
        });
        let keeps = payload.is_some() || self.response.is_some();
        keeps.then(|| StoredData::new(payload, self.response.clone()))
    }

    /// Whether there is anything to keep with any key.
    #[must_use]
    pub const fn keeps(&self) -> bool {
        self.payloads.is_some() || self.response.is_some()
    }

    /// The caller's token.
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }

    /// How long the key is remembered, from its first claim on.
    #[must_use]
    pub const fn retention(&self) -> Duration {
        self.retention
    }

    /// How long a claim holds without being renewed.
    #[must_use]
    pub const fn lease(&self) -> Duration {
        self.lease
    }

    /// [`retention`](Self::retention) in whole milliseconds, at most 2⁶¹: added to a Unix time it
    /// does not overflow an `i64`.
    #[must_use]
    pub fn retention_ms(&self) -> i64 {
        saturating_ms(self.retention)
    }

    /// [`lease`](Self::lease) in whole milliseconds, at most 2⁶¹.
    #[must_use]
    pub fn lease_ms(&self) -> i64 {
        saturating_ms(self.lease)
    }
}

fn saturating_ms(duration: Duration) -> i64 {
    const MOST: i64 = 1 << 61;
    i64::try_from(duration.as_millis()).map_or(MOST, |ms| ms.min(MOST))
}

/// What is known of an event that was seen before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seen {
    /// How long ago the event was first seen, by the store's clock.
    pub age: Duration,
}

impl Seen {
    /// An event first seen this long ago.
    #[must_use]
    pub const fn new(age: Duration) -> Self {
        Self { age }
    }
}

/// The answer to a `record`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recorded {
    /// The key was new; it is complete from now on.
    First,
    /// The key was complete.
    Duplicate(Seen),
    /// The key is under a live lease: another ledger on the same store is running it.
    InFlight,
}

/// The answer to a `claim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claimed {
    /// The caller holds the key now.
    #[non_exhaustive]
    First {
        /// How often the key has been claimed, this time included.
        attempt: u32,
        /// An earlier claim lapsed without a word: its handler may have half-run.
        takeover: bool,
    },
    /// The key is complete.
    Duplicate(Seen),
    /// Another token holds the key under a live lease.
    InFlight,
}

impl Claimed {
    /// A claim that was granted; `attempt` counts from 1.
    #[must_use]
    pub const fn first(attempt: u32, takeover: bool) -> Self {
        Self::First { attempt, takeover }
    }
}

/// The answer to a `renew`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// The caller holds the key for another lease.
    Held,
    /// Another token has it, or it is complete or released. Nothing was changed.
    Lost,
}

/// The answer to a `complete`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Completed {
    /// The caller held the key; it is complete now.
    Held,
    /// The key is complete, and the caller no longer held it: another handler may have run.
    LeaseLost,
    /// The store knew nothing of the key; it is complete now.
    Inserted,
}

/// The answer to a `release` or an `unrecord`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The caller held the key and holds it no longer.
    Released,
    /// The caller did not hold the key. Nothing was changed.
    NotHeld,
}

/// The answer to a `forget`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Forgotten {
    /// The key is gone.
    Removed,
    /// There was no such key.
    Missing,
    /// The key is under a live lease and was kept: forgetting it would let two handlers run.
    InFlight,
}

/// What a store knows of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Where it stands.
    pub state: EntryState,
    /// How often it was claimed since it was first seen.
    pub attempts: u32,
    /// Whether its last claim was a takeover.
    pub takeover: bool,
    /// When it was first seen.
    pub first_seen_at: SystemTime,
    /// When it stops being remembered.
    pub expires_at: SystemTime,
}

impl Entry {
    /// An entry that was claimed once and is no takeover.
    #[must_use]
    pub const fn new(state: EntryState, first_seen_at: SystemTime, expires_at: SystemTime) -> Self {
        Self { state, attempts: 1, takeover: false, first_seen_at, expires_at }
    }

    /// With this many attempts, the last of them a takeover or not.
    #[must_use]
    pub const fn with_attempts(mut self, attempts: u32, takeover: bool) -> Self {
        self.attempts = attempts;
        self.takeover = takeover;
        self
    }
}

/// Where a key stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryState {
    /// Claimed until this time, and not complete. If the time has passed, the lease has lapsed.
    InFlight {
        /// When the lease lapses, or lapsed.
        lease_until: SystemTime,
    },
    /// Claimed once, and given up by a handler that failed.
    Released,
    /// Complete: every further delivery is a duplicate.
    Complete {
        /// When it became complete.
        completed_at: SystemTime,
    },
}

/// Both kinds of shared handle forward every method.
macro_rules! forward {
    ($($handle:ident),+) => {$(
        impl<A: DedupAdapter + ?Sized> DedupAdapter for $handle<A> {
            fn record(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Vec<Recorded>, Error>> + Send {
                (**self).record(keys, terms)
            }

            fn unrecord(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Vec<Released>, Error>> + Send {
                (**self).unrecord(keys, terms)
            }
        }

        impl<A: LeaseAdapter + ?Sized> LeaseAdapter for $handle<A> {
            fn claim(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Vec<Claimed>, Error>> + Send {
                (**self).claim(keys, terms)
            }

            fn renew(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Vec<Renewed>, Error>> + Send {
                (**self).renew(keys, terms)
            }

            fn complete(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Vec<Completed>, Error>> + Send {
                (**self).complete(keys, terms)
            }

            fn release(
                &self,
                keys: &[DedupKey],
                terms: &CallTerms,
            ) -> impl Future<Output = Result<Vec<Released>, Error>> + Send {
                (**self).release(keys, terms)
            }
        }

        impl<A: MaintenanceAdapter + ?Sized> MaintenanceAdapter for $handle<A> {
            fn purge(&self, limit: u32) -> impl Future<Output = Result<u64, Error>> + Send {
                (**self).purge(limit)
            }

            fn forget(
                &self,
                key: &DedupKey,
            ) -> impl Future<Output = Result<Forgotten, Error>> + Send {
                (**self).forget(key)
            }

            fn get(
                &self,
                key: &DedupKey,
            ) -> impl Future<Output = Result<Option<Entry>, Error>> + Send {
                (**self).get(key)
            }

            fn count(&self) -> impl Future<Output = Result<u64, Error>> + Send {
                (**self).count()
            }

            fn close(&self) -> impl Future<Output = ()> + Send {
                (**self).close()
            }
        }
    )+};
}

forward!(Arc, Box);
