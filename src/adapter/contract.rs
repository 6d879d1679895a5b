//! The contract of a store, for authors of stores.
//!
//! 1. A store returns [`First`](ClaimReply::First) for a key to exactly one caller at a time,
//!    whatever the concurrency. It decides in one atomic step: never a check, then an insert.
//! 2. Every call carries a [`Token`] that the caller made. A call that is repeated with the same
//!    token returns the same reply, because the first reply may be lost.
//! 3. All times are the store's. Deadlines are computed in the store, after any wait for a lock or
//!    a connection. A key is expired when `expires_at <= now`.
//! 4. A live lease is never expired, evicted or purged. A purge deletes a key
//!    [`PURGE_GRACE`](super::maintenance::PURGE_GRACE) after it has expired, and not before.
//! 5. A completion takes effect even if another token holds the lease. `renew` and `release` need
//!    the token that holds it. A [release](DedupAdapter::release) is a fence: no earlier call with
//!    its token has an effect after it.
//! 6. Stored data comes with the duplicate, in the same call. A store may read it in a second step,
//!    after [`CallTerms::note_duplicate`], if this step finds the same row complete again.
//!    Otherwise the reply is [`InFlight`](ClaimReply::InFlight).
//! 7. A store that cannot answer returns a [`StoreError`]. It never guesses.
//! 8. A call that is not polled delays no other call.
//!
//! In these cases, two replies seem possible. The contract requires this one:
//!
//! | call | reply |
//! |---|---|
//! | a completion that inserted its row, repeated | [`Inserted`](CompleteReply::Inserted) again |
//! | a completion of a row that another token has taken, then that token's | [`LeaseLost`](CompleteReply::LeaseLost), then [`Held`](CompleteReply::Held): the row keeps the token of its holder |
//! | a completion of an incomplete row of another token that has expired | `LeaseLost`: its handler may have run. The row of a release or `forget` without a claim, and an expired complete row, count as missing: `Inserted` |
//! | a renewal after a release or [`forget`](super::maintenance::MaintenanceAdapter::forget) of any key | [`Lost`](RenewReply::Lost): both leave a row, an expired one if the key was not under a lease of the token |
//! | a claim under a lease, repeated after lease and retention have ended, before another claim | its first reply |
//! | a claim under a lease, repeated | starts the lease and the retention again |
//! | a later claim that brings an event type | the type of the first claim stays |
//! | a renewal or a completion with terms under [`OnClaim`](Permanence::OnClaim) | as with a lease of zero |
//!
//! A third party implements [`DedupAdapter`] for layers, and
//! [`MaintenanceAdapter`](super::maintenance::MaintenanceAdapter) for operators and purges. The
//! conformance suite, the package `tower-dedup-conformance`, tests both.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

pub use super::completion::Completion;
pub use super::replies::{ClaimReply, CompleteReply, RenewReply, Seen};
pub use super::stored::{Fetch, StoredData, StoredResponse};
pub use super::terms::{CallTerms, Permanence, Token};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The boxed future of a call to a store. `Box::pin(async move { … })` makes one.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// The contract of a store: claim a key, then complete or release it.
///
/// A call names one key. The ledger makes the calls for the keys of a delivery at the same time; a
/// store may send them together.
///
/// [`claim`](Self::claim) and [`release`](Self::release) under [`Permanence::OnClaim`] are all that
/// the `on_arrival` ledger needs. A store that also implements [`renew`](Self::renew) and
/// [`complete`](Self::complete) announces [`leases`](Abilities::leases).
///
/// # Cancel safety
///
/// The layer drops a call that outlives its `store_timeout`. The outcome of that call is unknown,
/// and the layer releases its token in the background.
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
/// use tower_dedup::adapter::contract::{
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
    /// - [`Permanence::OnCompletion`]: the key is in flight until its lease lapses. A complete key
    ///   is always a [`Duplicate`](ClaimReply::Duplicate). A claim that is repeated with the token
    ///   of the incomplete row returns the same reply, and starts the lease again.
    /// - [`Permanence::OnClaim`]: the key is complete at once, and the store holds the data of
    ///   [`CallTerms::stored_data`] from the same step on. A claim that is repeated with the token
    ///   of the complete row returns the same reply. With [`CallTerms::handled_at_ms`], the key is
    ///   complete since that time.
    ///
    /// A claim counts an attempt, except when it is repeated. An expired key is like a new one. A
    /// duplicate carries the stored data that [`CallTerms::fetch`] asks for.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] for terms that [`abilities`](Self::abilities) does not
    /// cover, before anything is written: see [`Abilities::check`]. Otherwise the store's own
    /// errors.
    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply>;

    /// Releases the key if this token claimed it. Otherwise the key stays as it is.
    ///
    /// - [`Permanence::OnCompletion`]: only an incomplete row of this token, because a late release
    ///   must never undo a completion. The row stays, without token and with its attempts.
    /// - [`Permanence::OnClaim`]: only a complete row of this token. The key is new then.
    ///
    /// A release is a fence. Once it has returned, no claim and no renewal with this token that was
    /// called before it has an effect, however late it arrives at the store. The layer drops such a
    /// call before it releases, and a wrapper drops the inner call with its own. A store whose
    /// calls travel over a network gives each row a version that every write raises. A release
    /// writes in every case: it raises the version of a row of others, keeps that row for
    /// [`PURGE_GRACE`](super::maintenance::PURGE_GRACE) more, and leaves an expired row where there
    /// was none. A claim takes an existing row at the version that it has read, and only while its
    /// caller waits.
    ///
    /// # Errors
    ///
    /// The store's own errors. The layer repeats a release for 10 min, after every error but
    /// [`StoreErrorKind::Unsupported`].
    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()>;

    /// Moves the end of the key's lease, if this token holds it. A lapsed or missing row is revived
    /// if no other token took the key.
    ///
    /// In a store whose rows open transactions hold, only a release and a completion wait for such
    /// a row. A claim is [`InFlight`](ClaimReply::InFlight) at once, or of unknown outcome if it
    /// may hold the row itself. A renewal is [`Locked`](RenewReply::Locked).
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        let _ = (key, terms);
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unsupported, "renewing leases")) })
    }

    /// Marks the key complete, whoever holds its lease; a missing row is inserted. The store holds
    /// the data of [`CallTerms::stored_data`] from the same step on. A complete key does not
    /// change.
    ///
    /// The retention counts from the claim. If it has ended, a new retention begins, because a
    /// completion must not be expired when it is written.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        let _ = (key, terms);
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unsupported, "completing keys")) })
    }

    /// Makes the statement that completes these keys in a transaction of the handler's: all keys
    /// that the delivery holds, each with its terms and the data of [`CallTerms::stored_data`].
    /// This method makes no call to the store.
    ///
    /// The terms are equal, except for the data to store, and so is the response. The statement
    /// writes the row of each key, whoever holds its lease, and takes the token of the terms. It
    /// fails if a key is complete already or has no row: the first COMMIT wins. A row that has
    /// expired begins a new retention. Without keys, it completes nothing and succeeds.
    ///
    /// If the terms fetch responses and bring none, the layer adds it by
    /// [`complete`](Self::complete) with the same token, which then replies
    /// [`Held`](CompleteReply::Held), and ends the lease, also without a response. Until then, and
    /// for as long as the lease lives, the key is [`InFlight`](ClaimReply::InFlight) for claims
    /// that fetch responses. Renewals with the token move that lease. In the stores of this crate,
    /// the statement starts it again: the lease of the claim may be over.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] by default.
    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Result<Completion, StoreError> {
        let _ = keys;
        Err(StoreError::new(StoreErrorKind::Unsupported, "completing events in a transaction"))
    }

    /// Returns `true` if the key is complete by the token of the terms. The transactional ledger
    /// asks after a handler that has completed its events by a statement of its own. Read from the
    /// primary, not from a replica.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] by default. Otherwise the store's own errors.
    fn is_complete<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, bool> {
        let _ = (key, terms);
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unsupported, "reading completions")) })
    }
}

/// A store in a SQL database, whose keys a handler completes in its own transaction.
///
/// The bound of [`DedupLayer::transactional`](crate::DedupLayer::transactional): with another
/// store, key and effect would be in two stores. Implement it for a store of your own that has
/// [`completion`](Abilities::completion).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot claim keys in the handler's transaction",
    label = "not an adapter of a SQL database",
    note = "the transactional ledger commits the key and the handler's writes together, so both must be \
            in one SQL database",
    note = "with this adapter, the key and the effect are in two stores: use the lease ledger, \
            `DedupLayer::new`"
)]
pub trait TransactionAdapter: DedupAdapter {}

impl<A: TransactionAdapter + ?Sized> TransactionAdapter for Arc<A> {}

/// The abilities of a store beyond claims that are complete at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Abilities {
    /// The store implements [`Permanence::OnCompletion`], [`renew`](DedupAdapter::renew) and
    /// [`complete`](DedupAdapter::complete).
    pub leases: bool,
    /// The store holds payload digests and responses with complete keys, and returns them with
    /// duplicates: see [`Fetch`]. With a second identity it holds the digest of its event's key.
    /// Without this ability, a complete second identity makes every event that has it a duplicate,
    /// and no record reports a replayed body.
    pub stored_data: bool,
    /// The store implements [`list`](super::maintenance::MaintenanceAdapter::list): it holds the
    /// names of its keys, and the [types](CallTerms::event_type) of their events.
    pub inspection: bool,
    /// The store deletes expired keys by itself, [`PURGE_GRACE`](super::maintenance::PURGE_GRACE)
    /// after they have expired: [`purge`](super::maintenance::MaintenanceAdapter::purge) has
    /// nothing to delete.
    pub expires_keys: bool,
    /// The store implements [`completion`](DedupAdapter::completion) and
    /// [`is_complete`](DedupAdapter::is_complete): a handler completes its events in its own
    /// transaction.
    pub completion: bool,
}

impl Abilities {
    /// Checks that these abilities cover the terms of a claim. [`claim`](DedupAdapter::claim) calls
    /// it before it writes anything.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unsupported`] for a lease without [`leases`](Self::leases), and for data
    /// to store or to fetch without [`stored_data`](Self::stored_data).
    pub fn check(self, terms: &CallTerms) -> Result<(), StoreError> {
        let wants_lease = matches!(terms.permanence(), Permanence::OnCompletion { .. });
        let wants_data = terms.stores_data() || terms.fetch() != Fetch::Nothing;
        if (wants_lease && !self.leases) || (wants_data && !self.stored_data) {
            return Err(StoreError::new(StoreErrorKind::Unsupported, "claiming keys"));
        }
        Ok(())
    }
}
