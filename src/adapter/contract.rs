//! The traits that a store implements, and the values that a call carries.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::stored::{Fetch, StoredData, StoredResponse};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// The boxed future of a call to a store. `Box::pin(async move { … })` makes one.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// The contract of a store: claim a key, then complete or release it.
///
/// The keys of a call are sorted and distinct. A call returns one reply per key, in the order of the
/// keys. Each key stands alone, so a store without multi-key operations may go through the keys one by
/// one, in the order given.
///
/// [`claim`](Self::claim) and [`release`](Self::release) under [`Permanence::OnClaim`] are all that
/// the `on_arrival` ledger needs. A store that also implements [`renew`](Self::renew) and
/// [`complete`](Self::complete) announces [`leases`](Abilities::leases).
///
/// # Cancel safety
///
/// The layer drops a call that outlives its `store_timeout`. The outcome of that call is unknown, and
/// the layer releases its token in the background.
///
/// # Example
///
/// A complete adapter for the `on_arrival` ledger:
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Mutex;
/// use std::time::Duration;
/// use tower_dedup::adapter::{
///     CallTerms, Claimed, DedupAdapter, Released, Seen, StoreFuture, Token,
/// };
/// use tower_dedup::{DedupKey, Error};
///
/// /// Remembers every key for as long as the process runs.
/// #[derive(Default)]
/// struct Forever(Mutex<HashMap<DedupKey, Token>>);
///
/// impl DedupAdapter for Forever {
///     fn claim<'a>(
///         &'a self,
///         keys: &'a [DedupKey],
///         terms: &'a CallTerms,
///     ) -> StoreFuture<'a, Vec<Claimed>> {
///         Box::pin(async move {
///             // Refuses leases and stored data, before anything is written.
///             self.abilities().check(terms)?;
///             let mut seen = self.0.lock().unwrap();
///             let claimed = keys.iter().map(|key| {
///                 match *seen.entry(key.clone()).or_insert(terms.token()) {
///                     token if token == terms.token() => Claimed::first(1, false),
///                     _ => Claimed::Duplicate(Seen::new(Duration::ZERO)),
///                 }
///             });
///             Ok(claimed.collect())
///         })
///     }
///
///     fn release<'a>(
///         &'a self,
///         keys: &'a [DedupKey],
///         terms: &'a CallTerms,
///     ) -> StoreFuture<'a, Vec<Released>> {
///         Box::pin(async move {
///             let mut seen = self.0.lock().unwrap();
///             let released = keys.iter().map(|key| {
///                 let is_held = seen.get(key) == Some(&terms.token());
///                 if is_held {
///                     seen.remove(key);
///                     return Released::Released;
///                 }
///                 Released::NotHeld
///             });
///             Ok(released.collect())
///         })
///     }
/// }
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let adapter = Forever::default();
/// let keys = [DedupKey::new("acme", "evt_1").unwrap()];
/// let day = Duration::from_secs(86_400);
/// let mine = CallTerms::on_claim(Token::random(), day);
/// assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
/// // The same token again: the reply was lost, so the store repeats it.
/// assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
/// let other = CallTerms::on_claim(Token::random(), day);
/// assert!(matches!(adapter.claim(&keys, &other).await.unwrap()[..], [Claimed::Duplicate(_)]));
/// let leased = CallTerms::on_completion(Token::random(), day, Duration::from_secs(60));
/// assert!(adapter.claim(&keys, &leased).await.is_err());
/// # });
/// ```
pub trait DedupAdapter: Send + Sync + 'static {
    /// Returns what the store can do. By default: neither leases nor stored data.
    ///
    /// A layer that needs more is refused when it is built.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Claims each key that is neither complete nor under a live lease of another token.
    ///
    /// - [`Permanence::OnCompletion`]: the key is in flight until its lease lapses. A complete key is
    ///   always a [`Duplicate`](Claimed::Duplicate). A claim that is repeated with the token of the
    ///   incomplete row returns the same reply, and sets the lease anew.
    /// - [`Permanence::OnClaim`]: the key is complete at once, and keeps what the terms carry for it. A
    ///   claim that is repeated with the token of the complete row returns the same reply.
    ///
    /// A claim counts an attempt, except when it is repeated. An expired key is like a new one. A
    /// duplicate carries the stored data that [`CallTerms::fetch`] asks for, read in the same atomic
    /// step in which the row was found complete.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] for terms that [`abilities`](Self::abilities) does not cover, before
    /// anything is written: see [`Abilities::check`]. Otherwise the store's own errors.
    fn claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Claimed>>;

    /// Gives up each key that this token claimed.
    ///
    /// - [`Permanence::OnCompletion`]: only an incomplete row of this token, because a late release
    ///   must never undo a completion. The row stays, without token and with its attempts.
    /// - [`Permanence::OnClaim`]: only a complete row of this token. The row is deleted.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Released>>;

    /// Moves the end of the lease of every key that this token holds. A lapsed or missing row is
    /// revived if no other token took the key.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Renewed>> {
        let _ = (keys, terms);
        Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "renewing leases")) })
    }

    /// Marks each key complete, whoever holds its lease; a missing row is inserted. The key keeps what
    /// the terms carry for it. A key that is complete already does not change.
    ///
    /// The retention counts from the claim. Where that retention has ended, it counts from now on,
    /// because a completion must not expire at birth.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Completed>> {
        let _ = (keys, terms);
        Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "completing keys")) })
    }
}

/// What a store can do beyond claims that are complete at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Abilities {
    /// The store implements [`Permanence::OnCompletion`], [`renew`](DedupAdapter::renew) and
    /// [`complete`](DedupAdapter::complete).
    pub leases: bool,
    /// The store keeps payload digests and responses with complete keys, and returns them with
    /// duplicates: see [`Fetch`].
    pub stored_data: bool,
}

impl Abilities {
    /// Neither leases nor stored data.
    #[must_use]
    pub const fn new() -> Self {
        Self { leases: false, stored_data: false }
    }

    /// Adds [`leases`](Self::leases).
    #[must_use]
    pub const fn with_leases(mut self) -> Self {
        self.leases = true;
        self
    }

    /// Adds [`stored_data`](Self::stored_data).
    #[must_use]
    pub const fn with_stored_data(mut self) -> Self {
        self.stored_data = true;
        self
    }

    /// Checks that these abilities cover the terms of a claim. [`claim`](DedupAdapter::claim) calls it
    /// before it writes anything.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] for a lease without [`leases`](Self::leases), and for data to store
    /// or to fetch without [`stored_data`](Self::stored_data).
    pub fn check(self, terms: &CallTerms) -> Result<(), Error> {
        let wants_lease = matches!(terms.permanence, Permanence::OnCompletion { .. });
        let wants_data = terms.stores_data() || terms.fetch != Fetch::Nothing;
        if (wants_lease && !self.leases) || (wants_data && !self.stored_data) {
            return Err(Error::new(ErrorKind::Unsupported, "claiming keys"));
        }
        Ok(())
    }
}

/// How long an expired key stays in the store before [`MaintenanceAdapter::purge`] deletes it: one hour.
///
/// The store's clock may be wrong for a while. Once the clock is right again, so is its judgement of
/// every row that is still there. A clock that is ahead by less than an hour makes no purge delete a
/// key before its retention has ended.
pub const PURGE_GRACE: Duration = Duration::from_secs(3_600);

/// What an operator and the purger do with a store.
///
/// A reference to a `dyn MaintenanceAdapter` coerces to a `dyn DedupAdapter`, so
/// [`connect`](super::connect) returns an adapter for layers and for maintenance.
pub trait MaintenanceAdapter: DedupAdapter {
    /// Deletes at most `limit` keys that expired [`PURGE_GRACE`] ago or earlier. Returns how many keys
    /// were deleted; fewer than `limit` means that there are no more. A live lease is never deleted,
    /// nor is a lease that lapsed less than `PURGE_GRACE` ago.
    ///
    /// # Errors
    ///
    /// The store's own errors; the next call continues. The SQL adapters return
    /// [`ErrorKind::Refused`] while the store's clock is ahead: by more than `PURGE_GRACE` of the
    /// clock at the last purge of this process plus the time since. A clock that stays ahead for
    /// `PURGE_GRACE` is accepted.
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64>;

    /// Deletes one key, so that its event can be delivered again. A live lease is kept.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten>;

    /// Returns what the store knows of one key; `None` for an unknown or expired key.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>>;

    /// Returns the number of stored keys, with expired keys that are not purged yet.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn count(&self) -> StoreFuture<'_, u64>;

    /// Closes the adapter's connections, after all calls that are under way.
    ///
    /// Every later call on this handle and its clones fails with
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable), and opens no connection. A pool that
    /// you gave to the adapter stays open.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// Forwards every method.
impl<A: DedupAdapter + ?Sized> DedupAdapter for Arc<A> {
    fn abilities(&self) -> Abilities {
        (**self).abilities()
    }

    fn claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Claimed>> {
        (**self).claim(keys, terms)
    }

    fn release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Released>> {
        (**self).release(keys, terms)
    }

    fn renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Renewed>> {
        (**self).renew(keys, terms)
    }

    fn complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Completed>> {
        (**self).complete(keys, terms)
    }
}

/// Forwards every method.
impl<A: MaintenanceAdapter + ?Sized> MaintenanceAdapter for Arc<A> {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        (**self).purge(limit)
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten> {
        (**self).forget(key)
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        (**self).get(key)
    }

    fn count(&self) -> StoreFuture<'_, u64> {
        (**self).count()
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        (**self).close()
    }
}

/// The name of one claim: 128 random bits that the caller makes *before* the call, so that a call
/// whose reply was lost can be repeated or released.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// Returns a new random token.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// Returns the token's bytes, for a store.
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

/// The terms of a call to a store.
///
/// Cloning is cheap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTerms {
    token: Token,
    retention: Duration,
    permanence: Permanence,
    fetch: Fetch,
    payloads: Option<Payloads>,
    response: Option<Arc<StoredResponse>>,
}

/// When a claimed key becomes permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Permanence {
    /// At once: the claim is complete.
    OnClaim,
    /// When it is completed. Until then a lease holds the key.
    OnCompletion {
        /// How long the claim holds without a renewal.
        lease: Duration,
    },
}

/// The SHA-256 of each key's payload, sorted by key.
pub(crate) type Payloads = Arc<[(DedupKey, [u8; 32])]>;

impl CallTerms {
    /// Terms under [`Permanence::OnClaim`].
    #[must_use]
    pub const fn on_claim(token: Token, retention: Duration) -> Self {
        Self::new(token, retention, Permanence::OnClaim)
    }

    /// Terms under [`Permanence::OnCompletion`] with this lease.
    #[must_use]
    pub const fn on_completion(token: Token, retention: Duration, lease: Duration) -> Self {
        Self::new(token, retention, Permanence::OnCompletion { lease })
    }

    const fn new(token: Token, retention: Duration, permanence: Permanence) -> Self {
        let (payloads, response) = (None, None);
        Self { token, retention, permanence, fetch: Fetch::Nothing, payloads, response }
    }

    /// Sets what stored data a duplicate carries.
    #[must_use]
    pub const fn with_fetch(mut self, fetch: Fetch) -> Self {
        self.fetch = fetch;
        self
    }

    /// Adds the SHA-256 of each key's payload, which the store keeps with the key once it is complete.
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

    /// Adds the handler's response, which the store keeps with every key of a completion.
    #[must_use]
    pub fn with_response(mut self, response: Arc<StoredResponse>) -> Self {
        self.response = Some(response);
        self
    }

    /// Returns what the store keeps with this key once it is complete; `None` for nothing.
    #[must_use]
    pub fn stored_data_for(&self, key: &DedupKey) -> Option<StoredData> {
        let payload = self.payloads.as_deref().and_then(|payloads| {
            let place = payloads.binary_search_by(|(of, _)| of.cmp(key)).ok()?;
            Some(payloads[place].1)
        });
        let is_some = payload.is_some() || self.response.is_some();
        is_some.then(|| StoredData::new(payload, self.response.clone()))
    }

    /// Returns `true` if there is data to store with any key.
    #[must_use]
    pub const fn stores_data(&self) -> bool {
        self.payloads.is_some() || self.response.is_some()
    }

    /// Returns the caller's token.
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }

    /// Returns how long the key is remembered, from its claim on.
    #[must_use]
    pub const fn retention(&self) -> Duration {
        self.retention
    }

    /// Returns when the key becomes permanent.
    #[must_use]
    pub const fn permanence(&self) -> Permanence {
        self.permanence
    }

    /// Returns what stored data a duplicate carries.
    #[must_use]
    pub const fn fetch(&self) -> Fetch {
        self.fetch
    }

    /// Returns how long a claim holds without a renewal; zero under [`Permanence::OnClaim`].
    #[must_use]
    pub const fn lease(&self) -> Duration {
        match self.permanence {
            Permanence::OnClaim => Duration::ZERO,
            Permanence::OnCompletion { lease } => lease,
        }
    }

    /// Returns [`retention`](Self::retention) in whole milliseconds, at most 2⁶¹: added to a Unix
    /// time it does not overflow an `i64`.
    #[must_use]
    pub fn retention_ms(&self) -> i64 {
        saturating_ms(self.retention)
    }

    /// Returns [`lease`](Self::lease) in whole milliseconds, at most 2⁶¹.
    #[must_use]
    pub fn lease_ms(&self) -> i64 {
        saturating_ms(self.lease())
    }
}

fn saturating_ms(duration: Duration) -> i64 {
    const MOST: i64 = 1 << 61;
    i64::try_from(duration.as_millis()).map_or(MOST, |ms| ms.min(MOST))
}

/// What the store knows of an event that was seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seen {
    /// The time since the event was first seen, by the store's clock.
    pub age: Duration,
    /// The data that is stored with the key. `None` under [`Fetch::Nothing`]. Otherwise `Some`, with
    /// an empty [`StoredData`] where nothing was stored.
    pub stored: Option<Arc<StoredData>>,
}

impl Seen {
    /// An event that was first seen this long ago, without stored data.
    #[must_use]
    pub const fn new(age: Duration) -> Self {
        Self { age, stored: None }
    }

    /// Adds the stored data.
    #[must_use]
    pub fn with_stored(mut self, stored: Arc<StoredData>) -> Self {
        self.stored = Some(stored);
        self
    }
}

/// The reply to a claim of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claimed {
    /// The caller holds the key. Under [`Permanence::OnClaim`] the key is complete.
    #[non_exhaustive]
    First {
        /// How often the key was claimed, this time included.
        attempt: u32,
        /// An earlier lease lapsed: its handler may have half-run.
        takeover: bool,
    },
    /// The key is complete.
    Duplicate(Seen),
    /// Another token holds the key under a live lease.
    InFlight,
}

impl Claimed {
    /// A claim that was granted. `attempt` counts from 1.
    #[must_use]
    pub const fn first(attempt: u32, takeover: bool) -> Self {
        Self::First { attempt, takeover }
    }
}

/// The reply to a renewal of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// The caller holds the key for another lease.
    Held,
    /// Another token holds the key, or the key is complete or released. Nothing changed.
    Lost,
}

/// The reply to a completion of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Completed {
    /// The caller held the key. The key is complete now.
    Held,
    /// The key is complete, and the caller did not hold it: another handler may have run.
    LeaseLost,
    /// The store did not know the key. The key is complete now.
    Inserted,
}

/// The reply to a release of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The caller held the key, and holds it no longer.
    Released,
    /// The caller did not hold the key. Nothing changed.
    NotHeld,
}

/// The reply to [`MaintenanceAdapter::forget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Forgotten {
    /// The key was deleted.
    Removed,
    /// There was no such key.
    Missing,
    /// The key is under a live lease and stays: otherwise two handlers could run.
    InFlight,
}

/// What a store knows of one key: the reply to [`MaintenanceAdapter::get`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The state of the key.
    pub state: EntryState,
    /// How often the key was claimed since it was first seen.
    pub attempts: u32,
    /// Whether the last claim was a takeover.
    pub takeover: bool,
    /// When the key was first seen.
    pub first_seen_at: SystemTime,
    /// When the retention of the key ends.
    pub expires_at: SystemTime,
}

impl Entry {
    /// An entry with one attempt, which was no takeover.
    #[must_use]
    pub const fn new(state: EntryState, first_seen_at: SystemTime, expires_at: SystemTime) -> Self {
        Self { state, attempts: 1, takeover: false, first_seen_at, expires_at }
    }

    /// Sets the number of attempts, and whether the last one was a takeover.
    #[must_use]
    pub const fn with_attempts(mut self, attempts: u32, takeover: bool) -> Self {
        self.attempts = attempts;
        self.takeover = takeover;
        self
    }
}

/// The state of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryState {
    /// Claimed and not complete.
    InFlight {
        /// When the lease lapses. A time in the past means that the lease has lapsed.
        lease_until: SystemTime,
    },
    /// Claimed before, and released because the handler failed.
    Released,
    /// Complete: every further delivery is a duplicate.
    Complete {
        /// When the key became complete.
        completed_at: SystemTime,
    },
}
