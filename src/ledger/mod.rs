//! Ledgers: *when* a key becomes permanent.
//!
//! | ledger | key is permanent | handler fails or panics | process dies mid-handler | concurrent duplicate | effect |
//! |---|---|---|---|---|---|
//! | [`Lease`] (default) | after a successful response | released at once; the retry runs | the lease lapses; the retry runs (takeover) | waits, then 200; past the bound 503 | at least once; once while no process and no store dies |
//! | [`OnArrival`] | before the handler | lost | lost | 200 | at most once |
//! | `Transactional` (features `postgres`, `sqlite`) | in the same COMMIT as the handler's writes | rolled back with them | rolled back with them | waits, then 200; past the bound 503 | exactly once, for all that is written in that database |
//!
//! 1. The layer makes the token before the call. After an unknown outcome (a timeout, a lost
//!    connection) the ledger undoes by token in the background: a lost answer neither blocks a key
//!    for a lease nor loses an event on arrival.
//! 2. Every call to the store has a bound, waiting for a connection included.
//! 3. What a handler did is not undone by a store that fails afterwards: its success is its
//!    answer, and is recorded in the background.
//! 4. A claim that is dropped without `commit` or `rollback` is rolled back, except what its handler
//!    has marked as done. A success that is being recorded is still recorded. What a dropped call to
//!    the store may have claimed is rolled back too.
//!
//! [`Ledger`] and [`Claim`] are all that the service knows, so another ledger needs no change
//! there.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{Extensions, StatusCode};

use crate::adapter::{CallTerms, Payloads, Seen, StoredResponse, Token};
use crate::delivery::Delivery;
use crate::error::Error;
use crate::key::Keys;

mod arrival;
mod call;
mod fold;
mod lease;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod lend;
mod pending;
mod recall;
mod renewal;
mod retry;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod transaction;

pub use arrival::{ArrivalClaim, OnArrival};
pub use lease::{Lease, LeaseClaim};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use lend::TxUnavailable;
pub use recall::{Recaller, Recalls, Replays};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::{TransactionClaim, Transactional, TxHandle};

/// Decides whether a delivery is the first, and makes its key permanent.
pub trait Ledger: Send + Sync + 'static {
    /// What a first delivery holds while its handler runs.
    type Claim: Claim;

    /// Begins a delivery of these keys.
    ///
    /// No client of a layer can cancel it: from its first wait on, it runs in the delivery's own
    /// task. Dropped otherwise, what it may have claimed is given up in the background.
    ///
    /// # Errors
    ///
    /// The store did not answer, and the policy is not to run unprotected. Whatever the call may
    /// have left behind is undone in the background.
    fn begin(
        &self,
        keys: &Keys,
        context: &BeginContext,
    ) -> impl Future<Output = Result<Begin<Self::Claim>, Error>> + Send;

    /// How much is under way in the background.
    fn background(&self) -> usize;

    /// Waits until nothing is under way in the background any more.
    fn drain(&self) -> impl Future<Output = ()> + Send;
}

/// A delivery that runs. Dropped without `commit` or `rollback`, it is rolled back as far as that
/// is still possible. If it is dropped within `commit`, a ledger that does not commit the handler's
/// effects itself goes on to record the success.
pub trait Claim: Send + 'static {
    /// The delivery, which the service puts into the request's extensions.
    fn delivery(&self) -> &Delivery;

    /// Adds what else the handler needs to the request: a transaction, for a ledger that lends
    /// one.
    fn attach(&self, extensions: &mut Extensions);

    /// The handler succeeded.
    ///
    /// # Errors
    ///
    /// Only from a ledger whose commit decides whether the handler's effect exists: the layer
    /// answers 503 then.
    fn commit(self, outcome: &HandlerSuccess) -> impl Future<Output = Result<(), Error>> + Send;

    /// The handler failed. Events that it marked as [done](Delivery::mark_done) are completed all the
    /// same.
    ///
    /// # Errors
    ///
    /// For logs only: the handler's failure is the answer.
    fn rollback(self) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A ledger that can run a handler although its store did not answer. One whose handlers depend on
/// a transaction cannot: there is none to lend.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot run a handler without its store",
    note = "a transactional delivery without a transaction does not exist"
)]
pub trait FailOpen: Ledger {}

/// The answer to [`Ledger::begin`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Begin<C> {
    /// Run the handler.
    #[non_exhaustive]
    First {
        /// What the delivery holds.
        claim: C,
        /// The events of a batch that do not run.
        others: Remainder,
    },
    /// Every event that is not complete runs elsewhere.
    InFlight,
    /// Every event is complete.
    Duplicate(DuplicateInfo),
    /// Every event is complete, and one of them was handled with another payload.
    Mismatch(DuplicateInfo),
}

impl<C> Begin<C> {
    /// Run the handler.
    pub const fn first(claim: C, others: Remainder) -> Self {
        Self::First { claim, others }
    }
}

/// What became of the events of a batch that do not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Remainder {
    /// Some run elsewhere: the final answer must not be a 2xx.
    pub in_flight: bool,
    /// One was handled with another payload.
    pub mismatch: bool,
}

/// A delivery of which nothing is new.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DuplicateInfo {
    /// What is known of its first event that is complete.
    pub seen: Seen,
    /// The response to that, if it was kept and is asked for.
    pub response: Option<Arc<StoredResponse>>,
}

impl DuplicateInfo {
    /// A delivery whose response was not kept.
    #[must_use]
    pub const fn new(seen: Seen) -> Self {
        Self { seen, response: None }
    }
}

/// The terms on which a delivery begins.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BeginContext {
    /// Made by the layer, before anything is asked of the store.
    pub token: Token,
    /// How long the key is remembered.
    pub retention: Duration,
    /// How long a claim holds without being renewed.
    pub lease: Duration,
    /// The bound on every call to the store.
    pub store_timeout: Duration,
    /// Whether to run the handler unprotected if the store does not reply.
    pub fail_open: bool,
    /// What asks the store for payloads and responses; `None` if neither is of interest.
    pub recaller: Option<Recaller>,
    /// Whether a duplicate is answered with the response to the first delivery.
    pub replays: bool,
    payloads: Option<Payloads>,
}

impl BeginContext {
    /// The terms for one delivery, with a token of its own.
    #[must_use]
    pub fn new(retention: Duration, lease: Duration, store_timeout: Duration) -> Self {
        Self {
            token: Token::random(),
            retention,
            lease,
            store_timeout,
            fail_open: false,
            recaller: None,
            replays: false,
            payloads: None,
        }
    }

    /// The SHA-256 of each key's payload, sorted by key.
    pub(crate) fn with_payloads(mut self, payloads: Option<Payloads>) -> Self {
        self.payloads = payloads;
        self
    }

    /// Sets whether to run the handler unprotected if the store does not reply.
    #[must_use]
    pub fn fail_open(mut self, fail_open: bool) -> Self {
        self.fail_open = fail_open;
        self
    }

    /// The same terms for a store.
    #[must_use]
    pub fn terms(&self) -> CallTerms {
        let terms = CallTerms::new(self.token, self.retention).with_lease(self.lease);
        match &self.payloads {
            Some(payloads) => terms.with_sorted_payloads(Arc::clone(payloads)),
            None => terms,
        }
    }
}

/// How a handler succeeded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HandlerSuccess {
    /// The status of its response.
    pub status: StatusCode,
    /// The response itself, if it is to be kept.
    pub response: Option<Arc<StoredResponse>>,
}

impl HandlerSuccess {
    /// A response of this status.
    #[must_use]
    pub const fn new(status: StatusCode) -> Self {
        Self { status, response: None }
    }

    /// Adds the response, to be kept with the keys.
    #[must_use]
    pub fn with_response(mut self, response: Arc<StoredResponse>) -> Self {
        self.response = Some(response);
        self
    }

    /// The terms of the completion that this outcome asks for.
    fn completes<'r>(&self, terms: &'r CallTerms) -> Cow<'r, CallTerms> {
        match &self.response {
            Some(response) => Cow::Owned(terms.clone().with_response(Arc::clone(response))),
            None => Cow::Borrowed(terms),
        }
    }
}
