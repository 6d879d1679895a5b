//! The traits that a store implements.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::inspection::{Cursor, ListFilter, Listing, Purged, Stats};
use super::replies::{ClaimReply, CompleteReply, Entry, ForgetReply, RenewReply};
use super::stored::Fetch;
use super::terms::{CallTerms, Permanence};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// The boxed future of a call to a store. `Box::pin(async move { … })` makes one.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// The contract of a store: claim a key, then complete or release it.
///
/// A call names one key. The ledger makes the calls for the keys of a delivery at the same time; a store
/// may send them together.
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
///
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_dedup::adapter::{
///     CallTerms, ClaimReply, DedupAdapter, Seen, StoreFuture, Token,
/// };
/// use tower_dedup::{BoxError, DedupKey, DedupLayer, key};
///
/// /// Remembers every key for as long as the process runs.
/// #[derive(Default)]
/// struct Forever(Mutex<HashMap<DedupKey, Token>>);
///
/// impl DedupAdapter for Forever {
///     fn claim<'a>(
///         &'a self,
///         key: &'a DedupKey,
///         terms: &'a CallTerms,
///     ) -> StoreFuture<'a, ClaimReply> {
///         Box::pin(async move {
///             // Refuses leases and stored data, before anything is written.
///             self.abilities().check(terms)?;
///             let mut seen = self.0.lock().unwrap();
///             Ok(match *seen.entry(key.clone()).or_insert(terms.token()) {
///                 token if token == terms.token() => ClaimReply::first(1, false),
///                 _ => ClaimReply::Duplicate(Seen::new(Duration::ZERO)),
///             })
///         })
///     }
///
///     fn release<'a>(
///         &'a self,
///         key: &'a DedupKey,
///         terms: &'a CallTerms,
///     ) -> StoreFuture<'a, ()> {
///         Box::pin(async move {
///             let mut seen = self.0.lock().unwrap();
///             if seen.get(key) == Some(&terms.token()) {
///                 seen.remove(key);
///             }
///             Ok(())
///         })
///     }
/// }
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let adapter = Forever::default();
/// let key = DedupKey::new("acme", "evt_1").unwrap();
/// let day = Duration::from_secs(86_400);
/// let mine = CallTerms::on_claim(Token::random(), day);
/// assert_eq!(adapter.claim(&key, &mine).await.unwrap(), ClaimReply::first(1, false));
/// // The same token again: the reply was lost, so the store repeats it.
/// assert_eq!(adapter.claim(&key, &mine).await.unwrap(), ClaimReply::first(1, false));
/// let other = CallTerms::on_claim(Token::random(), day);
/// assert!(matches!(adapter.claim(&key, &other).await.unwrap(), ClaimReply::Duplicate(_)));
/// let leased = CallTerms::on_completion(Token::random(), day, Duration::from_secs(60));
/// assert!(adapter.claim(&key, &leased).await.is_err());
///
/// // A layer under a lease refuses the adapter; an on-arrival layer works.
/// let by_header = key::header("webhook-id").namespace("acme");
/// assert!(DedupLayer::new(by_header.clone(), Forever::default()).checked().is_err());
/// let service = ServiceBuilder::new()
///     .layer(DedupLayer::on_arrival(by_header, Forever::default()))
///     .service(service_fn(async |_: Request<Full<Bytes>>| {
///         Ok::<_, BoxError>(Response::new(String::new()))
///     }));
/// let deliver = || {
///     let event = Request::post("/").header("webhook-id", "msg_1");
///     service.clone().oneshot(event.body(Full::<Bytes>::default()).unwrap())
/// };
/// assert!(deliver().await?.headers().get("x-dedup-result").is_none());
/// assert_eq!(deliver().await?.headers()["x-dedup-result"], "duplicate");
/// # Ok::<(), BoxError>(())
/// # }).unwrap();
/// ```
///
#[doc = include_str!("../docs/stores/own.md")]
pub trait DedupAdapter: Send + Sync + 'static {
    /// Returns the abilities of the store. By default: neither leases nor stored data.
    ///
    /// A layer that needs more is refused when it is built.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Claims a key that is neither complete nor under a live lease of another token.
    ///
    /// - [`Permanence::OnCompletion`]: the key is in flight until its lease lapses. A complete key is
    ///   always a [`Duplicate`](ClaimReply::Duplicate). A claim that is repeated with the token of the
    ///   incomplete row returns the same reply, and starts the lease again.
    /// - [`Permanence::OnClaim`]: the key is complete at once, and the store holds the data of
    ///   [`CallTerms::stored_data_for`] from the same step on. A claim that is repeated with the token of
    ///   the complete row returns the same reply.
    ///
    /// A claim counts an attempt, except when it is repeated. An expired key is like a new one. A
    /// duplicate carries the stored data that [`CallTerms::fetch`] asks for. A store may read it in a
    /// second step, if this step finds the row complete again. Otherwise the reply is
    /// [`InFlight`](ClaimReply::InFlight).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] for terms that [`abilities`](Self::abilities) does not cover, before
    /// anything is written: see [`Abilities::check`]. Otherwise the store's own errors.
    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply>;

    /// Releases the key if this token claimed it. Otherwise the key stays as it is.
    ///
    /// - [`Permanence::OnCompletion`]: only an incomplete row of this token, because a late release
    ///   must never undo a completion. The row stays, without token and with its attempts.
    /// - [`Permanence::OnClaim`]: only a complete row of this token. The key is new then.
    ///
    /// A release is a fence. Once it has returned, no claim and no renewal with this token that was called
    /// before it has an effect, however late it arrives at the store. The layer drops such a call before it
    /// releases, and a wrapper drops the inner call with its own. A store whose calls travel over a network
    /// gives each row a version that every write raises. A release writes in every case: it raises the version of a
    /// row of others, and leaves an expired row where there was none. A claim takes an existing row at the version
    /// that it has read, and only while its caller waits.
    ///
    /// # Errors
    ///
    /// The store's own errors. The layer repeats a release after a [transient](Error::is_transient) error, and after
    /// no other.
    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()>;

    /// Moves the end of the key's lease, if this token holds it. A lapsed or missing row is revived if no
    /// other token took the key.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        let _ = (key, terms);
        Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "renewing leases")) })
    }

    /// Marks the key complete, whoever holds its lease; a missing row is inserted. The store holds
    /// the data of [`CallTerms::stored_data_for`] from the same step on. A complete key does not change.
    ///
    /// The retention counts from the claim. If it has ended, a new retention begins, because a completion
    /// must not be expired when it is written.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        let _ = (key, terms);
        Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "completing keys")) })
    }
}

/// The abilities of a store beyond claims that are complete at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Abilities {
    /// The store implements [`Permanence::OnCompletion`], [`renew`](DedupAdapter::renew) and
    /// [`complete`](DedupAdapter::complete).
    pub leases: bool,
    /// The store holds payload digests and responses with complete keys, and returns them with
    /// duplicates: see [`Fetch`]. With a second identity it holds the digest of its event's key. Without this
    /// ability, a complete second identity makes every event a duplicate, and no record tells a replayed body.
    pub stored_data: bool,
    /// The store implements [`list`](MaintenanceAdapter::list): it holds the names of its keys, and the
    /// [types](CallTerms::event_type_for) of their events.
    pub inspection: bool,
    /// The store deletes expired keys by itself, [`PURGE_GRACE`] after they have expired:
    /// [`purge`](MaintenanceAdapter::purge) has nothing to delete.
    pub expires_keys: bool,
}

impl Abilities {
    /// Returns no ability.
    #[must_use]
    pub const fn new() -> Self {
        Self { leases: false, stored_data: false, inspection: false, expires_keys: false }
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

    /// Adds [`inspection`](Self::inspection).
    #[must_use]
    pub const fn with_inspection(mut self) -> Self {
        self.inspection = true;
        self
    }

    /// Adds [`expires_keys`](Self::expires_keys).
    #[must_use]
    pub const fn with_expires_keys(mut self) -> Self {
        self.expires_keys = true;
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
        let wants_lease = matches!(terms.permanence(), Permanence::OnCompletion { .. });
        let wants_data = terms.stores_data() || terms.fetch() != Fetch::Nothing;
        if (wants_lease && !self.leases) || (wants_data && !self.stored_data) {
            return Err(Error::new(ErrorKind::Unsupported, "claiming keys"));
        }
        Ok(())
    }
}

/// How long an expired key stays in the store before [`MaintenanceAdapter::purge`] deletes it: one hour.
///
/// The store's clock may be wrong for a while. Once the clock is right again, rows that still exist
/// are judged correctly. A clock that is ahead by less than an hour makes no purge delete a
/// key before its retention has ended.
pub const PURGE_GRACE: Duration = Duration::from_secs(3_600);

/// The calls of operators and of the purger to a store.
///
/// A reference to a `dyn MaintenanceAdapter` coerces to a `dyn DedupAdapter`, so
/// [`connect`](super::connect) returns an adapter for layers and for maintenance.
pub trait MaintenanceAdapter: DedupAdapter {
    /// Deletes at most `limit` keys that expired [`PURGE_GRACE`] ago or earlier. A live lease is never
    /// deleted, nor is a lease that lapsed less than `PURGE_GRACE` ago.
    ///
    /// A call that deletes fewer keys than `limit` has left no key to delete, except those that another call has
    /// locked. A store may [delete expired keys by itself](Abilities::expires_keys); then a call deletes nothing.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn purge(&self, limit: u32) -> StoreFuture<'_, Purged>;

    /// Forgets one key: an operator lets its event run again. A live lease stays.
    ///
    /// An earlier run that still succeeds, or whose completion is under way, completes the key again.
    ///
    /// On Postgres and Redis an expired row stays in place of the key for [`PURGE_GRACE`], so that a claim which
    /// is still on its way has no effect. They do not repeat the call after a lost reply: the outcome is then
    /// unknown, and [`get`](Self::get) shows the key.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply>;

    /// Returns the state of one key and its stored data; `None` for an unknown or expired key.
    ///
    /// Changes nothing. A stored response that cannot be read is no error: see
    /// [`Entry::response_is_unreadable`].
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>>;

    /// Returns one portion of the keys that `filter` selects, at most `limit` of them (at least one),
    /// and where the next portion begins. The first call passes no cursor.
    ///
    /// A call reads a bounded part of the store, also if the filter selects few keys. The SQL adapters read 10,000
    /// keys, in the order of the primary key, and a [`Cursor`] is the last of them. A key that is written during the
    /// list may be absent; on Redis it may occur twice. A key that is stuck is not written, so the list has it. An
    /// unreadable key is left out, and [counted](Listing::unreadable). Changes nothing.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] unless the store announces [`inspection`](Abilities::inspection), which
    /// is the default; [`ErrorKind::Refused`] for a cursor of another store; else the store's own errors.
    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a Cursor>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        let _ = (filter, after, limit);
        Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "listing keys")) })
    }

    /// Returns how many keys are in each state: exactly for a small store, and about for a large one, of which a
    /// bounded part is read ([`Stats`]). Changes nothing.
    ///
    /// # Errors
    ///
    /// The store's own errors.
    fn stats(&self) -> StoreFuture<'_, Stats>;

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

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        (**self).claim(key, terms)
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        (**self).release(key, terms)
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        (**self).renew(key, terms)
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        (**self).complete(key, terms)
    }
}

/// Forwards every method.
impl<A: MaintenanceAdapter + ?Sized> MaintenanceAdapter for Arc<A> {
    fn purge(&self, limit: u32) -> StoreFuture<'_, Purged> {
        (**self).purge(limit)
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        (**self).forget(key)
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        (**self).get(key)
    }

    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a Cursor>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        (**self).list(filter, after, limit)
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        (**self).stats()
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        (**self).close()
    }
}
