//! [`Deduplicator`]: the ledgers without HTTP, for queue consumers and schedulers.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument;

use crate::adapter::contract::{DedupAdapter, Fetch, Seen, TransactionAdapter};
use crate::delivery::Delivery;
use crate::error::{ConfigError, StoreError, StoreErrorKind};
use crate::key::{Event, Keys, sha256};
use crate::layer::OnUnavailable;
use crate::ledger::{
    AnyLedger, Begin, Calls, FailOpen, HandlerSuccess, Lease, Ledger, OnArrival, Settled,
    TRANSACTIONAL_LEASE, Times, Transactional,
};
use crate::observe::{MetersByNamespace, Outcome, RunReport};
use crate::run::{Called, NotBegun, Waiters, call};

/// Runs a handler for an event, unless the event is a duplicate or in flight.
///
/// A call runs the handler at most once, and repeats nothing: the caller delivers a failed event
/// again. The [ledger](crate::ledger) decides how often one event takes effect. Under a lease: at
/// least once, and twice only if a process or the store dies in between. On arrival: at most once.
/// In a transaction: exactly once, for the handler's writes there.
///
/// | setting | default |
/// |---|---|
/// | [`retention`](Self::retention) | 30 days |
/// | [`lease`](Self::lease) | 60 s, renewed at 20 s |
/// | [`store_timeout`](Self::store_timeout) | 2 s |
/// | [`handler_timeout`](Self::handler_timeout) | off |
/// | [`wait`](Self::wait) | zero: an event in flight is reported at once |
/// | [`on_unavailable`](Self::on_unavailable) | closed: an error, and the handler does not run |
///
/// It shares its keys with every layer and every deduplicator over the same store. Unlike a layer,
/// it starts no task for the handler. The handler runs in the caller's task, so the caller bounds
/// how many run at once. A setter stores its value, and [`checked`](Self::checked) reports an
/// invalid one. It has no [`Mode`](crate::Mode), because it answers no sender: a caller that
/// only observes can run the event under every [`RunOutcome`].
///
/// # Clone
///
/// A clone shares the ledger and the waiting runs with its original, and has its own settings.
///
/// # Observation
///
/// A run has the log record, the metrics and the spans of a delivery: see
/// [`observe`](crate::observe). Their namespace is that of the key, and the id is shown as it is.
/// The first 1,000 namespaces have time series of their own, and the metrics count all others as
/// `other`.
///
/// # Cancel safety
///
/// Dropping the future of [`run`](Self::run) drops the handler at its `.await`. The rest continues
/// in the background; [`drain`](Self::drain) waits for it:
///
/// - dropped while the keys are claimed, or while the handler runs: the keys are released, as after
///   a failure. On arrival, an event whose handler has started is lost.
/// - dropped while a success is completed: the keys become complete. In a transaction, the COMMIT
///   decides; the next `run` is a duplicate, or runs the handler.
/// - dropped while a failure is released: the keys are released.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupKey, Deduplicator, RunOutcome};
///
/// let dedup = Deduplicator::new(MemoryAdapter::new());
/// let key = DedupKey::new("invoices", "invoice_17")?;
///
/// let failed = dedup.run(&key, async |_| Err::<(), _>("no paper")).await;
/// assert!(failed.is_err()); // the key is released: the queue delivers again
/// let first = dedup.run(&key, async |event| Ok::<_, &str>(event.attempt())).await;
/// assert_eq!(first.unwrap(), RunOutcome::First(2));
/// let again = dedup.run(&key, async |_| Ok::<_, &str>(0)).await;
/// assert!(matches!(again.unwrap(), RunOutcome::Duplicate(_))); // acknowledge the message
/// # Ok::<(), tower_dedup::KeyError>(())
/// # }).unwrap();
/// ```
#[must_use = "a deduplicator does nothing until `run` is called"]
pub struct Deduplicator<L = Lease> {
    ledger: Arc<AnyLedger>,
    meters: Arc<MetersByNamespace>,
    waiters: Arc<Waiters>,
    settings: Settings,
    types: PhantomData<fn() -> L>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Settings {
    times: Times,
    wait: Duration,
    fail_open: bool,
}

impl Deduplicator {
    /// Deduplicates under a lease: a key becomes permanent when its handler has succeeded.
    ///
    /// Invalid for an adapter without [`leases`](crate::adapter::contract::Abilities::leases).
    pub fn new(adapter: impl DedupAdapter) -> Self {
        Self::under(adapter)
    }

    /// Deduplicates on arrival: a key becomes permanent before its handler runs, and an event whose
    /// handler fails is lost. Use clones of one deduplicator, as of [a
    /// layer](crate::DedupLayer::on_arrival).
    pub fn on_arrival(adapter: impl DedupAdapter) -> Deduplicator<OnArrival> {
        Deduplicator::under(adapter)
    }

    /// Deduplicates in the handler's own transaction: the key and the handler's writes commit
    /// together, or not at all. The handler begins the transaction by [`Delivery::begin`], as under
    /// [`DedupLayer::transactional`](crate::DedupLayer::transactional): after a success without a
    /// completion, [`run`](Self::run) returns [`RunError::Uncommitted`].
    pub fn transactional(adapter: impl TransactionAdapter) -> Deduplicator<Transactional> {
        Deduplicator::under(adapter).lease(TRANSACTIONAL_LEASE)
    }
}

impl<L: Ledger> Deduplicator<L> {
    fn under(adapter: impl DedupAdapter) -> Self {
        Self {
            ledger: AnyLedger::of::<L>(adapter),
            meters: Arc::default(),
            waiters: Arc::default(),
            settings: Settings::default(),
            types: PhantomData,
        }
    }

    /// Sets how long a key is remembered, as
    /// [`DedupLayer::retention`](crate::DedupLayer::retention).
    ///
    /// Zero and more than 1,000 years are invalid.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.times.retention = retention;
        self
    }

    /// Sets how long a claim holds unless it is renewed, as
    /// [`DedupLayer::lease`](crate::DedupLayer::lease).
    ///
    /// A lease below 100 ms is invalid.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.times.lease = lease;
        self
    }

    /// Sets the bound on every call to the store, waiting for a connection included.
    ///
    /// Zero is invalid, and so are more than 30 s.
    pub fn store_timeout(mut self, bound: Duration) -> Self {
        self.settings.times.store_timeout = bound;
        self
    }

    /// Sets how long a handler may run, as
    /// [`DedupLayer::handler_timeout`](crate::DedupLayer::handler_timeout). Past that,
    /// [`run`](Self::run) returns [`RunError::TimedOut`].
    ///
    /// Zero is invalid.
    pub fn handler_timeout(mut self, bound: Duration) -> Self {
        self.settings.times.handler_timeout = Some(bound);
        self
    }

    /// Sets how long [`run`](Self::run) waits for an event in flight, at most a day. It polls the
    /// store after 2 to 4 ms, then at intervals that grow by the factor 1.5 to between 250 and 500
    /// ms. It also polls at once when a run of the event ends in this deduplicator or in a clone.
    /// At most 8 runs wait for one key; for any further run, the key is in flight.
    pub fn wait(mut self, bound: Duration) -> Self {
        self.settings.wait = bound;
        self
    }

    /// Returns the deduplicator, if it can run.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first setting with an invalid value, and for an adapter that lacks
    /// an ability.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), ConfigError> {
        // A run refuses an event that the ledger does not take.
        let times = &self.settings.times;
        times.check()?;
        self.ledger.check(times, false)
    }

    /// Returns the number of completions and releases that continue in the background.
    #[must_use]
    pub fn pending_writes(&self) -> usize {
        self.ledger.pending_writes().len()
    }

    /// Waits until no completion and no release continues in the background. Await it before the
    /// runtime ends, because they end with the runtime: see
    /// [`DedupHandle::drain`](crate::DedupHandle::drain).
    pub async fn drain(&self) {
        self.ledger.pending_writes().wait().await;
    }

    /// Runs `handler` if the event is new, and makes its keys permanent if `handler` succeeds.
    ///
    /// A [`DedupKey`](crate::DedupKey) or a reference to one is an event; [`Event`] adds a second
    /// identity. If the event [has a payload](Event::with_payload), its SHA-256 is stored with the
    /// key and compared with that of the event that was handled: see [`RunOutcome::Mismatch`].
    ///
    /// # Errors
    ///
    /// - [`RunError::Handler`] if the handler failed, [`RunError::TimedOut`] if it took too long:
    ///   the key is released for the next attempt.
    /// - [`RunError::Uncommitted`] if the handler succeeded without a commit that it owes, as after
    ///   [`Delivery::begin`]: the key is released.
    /// - [`RunError::Store`] if the store did not reply. Its kind is [`StoreErrorKind::Config`] if
    ///   [`checked`](Self::checked) returns an error, and [`StoreErrorKind::Unsupported`] if the
    ///   event has a payload and the adapter has no
    ///   [`stored_data`](crate::adapter::contract::Abilities::stored_data).
    ///
    /// After any of them, do not acknowledge the message.
    ///
    /// # Panics
    ///
    /// A panic of the handler is resumed once its key is released.
    pub async fn run<T, E, F>(
        &self,
        event: impl Into<Event>,
        handler: impl FnOnce(Delivery) -> F,
    ) -> Result<RunOutcome<T>, RunError<E>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let digest = |event: &Event| Ok::<_, Infallible>(event.payload().map(|it| sha256(it)));
        let Ok(keys) = Keys::from(event.into()).with_digests(digest);
        let meters = self.meters.get(keys.first().namespace());
        let report = RunReport::start(meters, keys);
        let span = report.fields.span.clone();
        self.run_reported(handler, report).instrument(span).await
    }

    async fn run_reported<T, E, F>(
        &self,
        handler: impl FnOnce(Delivery) -> F,
        mut report: RunReport,
    ) -> Result<RunOutcome<T>, RunError<E>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let (claim, delivery) = match self.claim(&report).await {
            Ok(Begin::First { claim, delivery, .. }) => (claim, delivery),
            Ok(Begin::Duplicate(seen)) => {
                report.fields.age = Some(seen.age);
                report.end(Outcome::Duplicate, None);
                return Ok(RunOutcome::Duplicate(seen));
            }
            Ok(Begin::Mismatch(seen)) => {
                report.fields.age = Some(seen.age);
                report.end(Outcome::Mismatch, None);
                return Ok(RunOutcome::Mismatch(seen));
            }
            // An event has a key.
            Ok(Begin::InFlight | Begin::WithoutKey) => {
                report.end(Outcome::InFlight, None);
                return Ok(RunOutcome::InFlight);
            }
            Err(error) => {
                report.end(Outcome::Unavailable, Some(&error));
                return Err(RunError::Store(error));
            }
        };
        report.fields.attempt = Some((delivery.attempt(), delivery.is_takeover()));
        let bound = self.settings.times.handler_timeout;
        let called = call(bound, || handler(delivery)).await;
        let is_success = matches!(called, Called::Returned(Ok(_)));
        let settled = match claim {
            Some(claim) => claim.settle(is_success.then(HandlerSuccess::default)).await,
            None => Settled::Done,
        };
        self.waiters.wake(report.keys.events().iter().flat_map(Event::identities));
        if let (Called::Returned(_), Settled::CompletedElsewhere(seen)) = (&called, &settled) {
            report.fields.age = Some(seen.age);
            report.end(Outcome::Duplicate, None);
            return Ok(RunOutcome::Duplicate(seen.clone()));
        }
        let outcome = match (&called, &settled) {
            (Called::Returned(Ok(_)), Settled::Uncommitted | Settled::Unconfirmed(_)) => {
                Outcome::Uncommitted
            }
            (Called::Returned(Ok(_)), _) => Outcome::Completed,
            (Called::Returned(Err(_)), _) => Outcome::Failed,
            (Called::TimedOut, _) => Outcome::HandlerTimeout,
            (Called::Panicked(_), _) => Outcome::Panicked,
        };
        let error = match &settled {
            Settled::Unconfirmed(error) | Settled::NotReleased(error) => Some(error),
            _ => None,
        };
        report.end(outcome, error);
        // Not in an unwind: a panic of a subscriber would abort the process.
        drop(report);
        match called {
            Called::Returned(Ok(value)) => match settled {
                Settled::Uncommitted => Err(RunError::Uncommitted),
                Settled::Unconfirmed(error) => Err(RunError::Store(error)),
                Settled::Done | Settled::CompletedElsewhere(_) | Settled::NotReleased(_) => {
                    Ok(RunOutcome::First(value))
                }
            },
            Called::Returned(Err(error)) => Err(RunError::Handler(error)),
            Called::TimedOut => Err(RunError::TimedOut),
            Called::Panicked(panic) => resume_unwind(panic),
        }
    }

    /// Claims the event. While it is in flight, claims it again until the wait is over.
    async fn claim(&self, report: &RunReport) -> Result<Begin, StoreError> {
        let (calls, wait) = (self.calls(report)?, self.settings.wait);
        let begun = self.ledger.begin(&report.keys, calls.clone()).await?;
        if !matches!(begun, Begin::InFlight) || wait.is_zero() {
            return Ok(begun);
        }
        let Some(waiter) = self.waiters.wait_for(&report.keys) else { return Ok(begun) };
        let _waiting = report.meters.waiting();
        let begun = waiter.claim(&self.ledger, &calls, wait, &mut ()).await;
        begun.map_err(|NotBegun::Failed(error)| error)
    }

    fn calls(&self, report: &RunReport) -> Result<Calls, StoreError> {
        self.check().map_err(|error| {
            StoreError::new(StoreErrorKind::Config, "running an event").with_source(error)
        })?;
        let is_compared = report.keys.events()[0].payload_sha256().is_some();
        if is_compared && !self.ledger.stores_data() {
            return Err(StoreError::new(StoreErrorKind::Unsupported, "comparing a payload"));
        }
        let Settings { times, fail_open, .. } = self.settings;
        let mut calls = self.ledger.calls(&times, Duration::ZERO, &report.meters);
        calls.terms.fetch = if is_compared { Fetch::Digest } else { Fetch::Nothing };
        calls.fails_open = fail_open;
        Ok(calls)
    }
}

impl<L: FailOpen> Deduplicator<L> {
    /// Sets what to do with an event while the store does not reply. See
    /// [`DedupLayer::on_unavailable`](crate::DedupLayer::on_unavailable).
    pub fn on_unavailable(mut self, policy: OnUnavailable) -> Self {
        self.settings.fail_open = policy == OnUnavailable::FailOpen;
        self
    }
}

impl<L> Clone for Deduplicator<L> {
    fn clone(&self) -> Self {
        let (ledger, meters) = (Arc::clone(&self.ledger), Arc::clone(&self.meters));
        let (waiters, settings) = (Arc::clone(&self.waiters), self.settings);
        Self { ledger, meters, waiters, settings, types: PhantomData }
    }
}

impl<L> fmt::Debug for Deduplicator<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deduplicator").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// What [`Deduplicator::run`] did with an event.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunOutcome<T> {
    /// The handler ran and succeeded.
    First(T),
    /// The event was handled before: acknowledge the message.
    Duplicate(Seen),
    /// The event was handled before, with another payload. The handler did not run, and would not
    /// run if the message came again: park the message.
    Mismatch(Seen),
    /// Another handler runs the event and may fail: let the queue deliver the message again later.
    InFlight,
}

/// Why an event was not handled.
///
/// It implements [`Error`](std::error::Error) only if `E` does, which [`BoxError`](crate::BoxError)
/// does not.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The store did not reply, or refused.
    Store(StoreError),
    /// The handler failed.
    Handler(E),
    /// The handler succeeded, and no transaction of it has completed the event: see
    /// [`Delivery::begin`](crate::Delivery::begin). The event is released.
    Uncommitted,
    /// The handler ran longer than [`Deduplicator::handler_timeout`].
    TimedOut,
}

impl<E> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Store(_) => "the ledger failed",
            Self::Handler(_) => "the handler failed",
            Self::Uncommitted => "no transaction of the handler has completed the event",
            Self::TimedOut => "the handler timed out",
        })
    }
}

impl<E: std::error::Error + 'static> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            Self::Handler(error) => Some(error),
            Self::Uncommitted | Self::TimedOut => None,
        }
    }
}
