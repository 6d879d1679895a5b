//! [`Deduplicator`]: the ledgers, for code that no HTTP request calls: queue consumers, schedulers.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::TransactionAdapter;
use crate::adapter::{DedupAdapter, Seen};
use crate::delivery::Delivery;
use crate::error::{ConfigError, Error};
use crate::key::{DedupKey, Keys};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::ledger::Transactional;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::ledger::transaction::{DedupTx, TxHandle, TxUnavailable};
use crate::ledger::{Begin, BeginContext, Claim, HandlerSuccess, Lease, Ledger, OnArrival};

/// Runs the work of each key until it has succeeded once, under a [ledger](crate::ledger).
///
/// How often the work of one key runs, and succeeds, is the ledger's promise: under a lease at least
/// once, and once while no process and no store dies; on arrival at most once; in a transaction,
/// what it writes there exactly once.
///
/// It shares its store, and so its keys, with every layer and worker that uses the same one. Unlike
/// a layer it starts no task: the work runs in the caller's.
///
/// # Cancel safety
///
/// If the future is dropped, so is the work, wherever it is. What is left to do then goes on in the
/// runtime's background; [`drain`](Self::drain) waits for it:
///
/// - dropped while the key is claimed, or while the work runs: the key is free again, as after a
///   failure. On arrival, work that has begun is lost. What the work has marked as done stays done.
/// - dropped while a success is completed: the key is complete. In a transaction, the COMMIT
///   decides, and the next call finds out.
/// - dropped while a failure is released: the key is free.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupKey, Deduplicator, RunOutcome};
///
/// let worker = Deduplicator::new(MemoryAdapter::new());
/// let key = DedupKey::new("invoices", "invoice_17")?;
///
/// let failed = worker.run(&key, async |_| Err::<(), _>("no paper")).await;
/// assert!(failed.is_err()); // the key is free: the queue delivers again …
/// let first = worker.run(&key, async |work| Ok::<_, &str>(work.delivery().attempt())).await;
/// assert_eq!(first.unwrap(), RunOutcome::First(2));
/// let again = worker.run(&key, async |_| Ok::<_, &str>(0)).await;
/// assert!(matches!(again.unwrap(), RunOutcome::Duplicate(_))); // … to be acknowledged
/// # Ok::<(), tower_dedup::KeyError>(())
/// # }).unwrap();
/// ```
#[must_use = "a worker does nothing until it is given work"]
pub struct Deduplicator<L = Lease> {
    ledger: Arc<L>,
    retention: Duration,
    lease: Duration,
    store_timeout: Duration,
}

impl Deduplicator {
    /// A worker under a lease. It remembers keys for 30 days, with leases of 60 s and 2 s for each
    /// call to the store.
    ///
    /// # Panics
    ///
    /// Panics if the adapter has no [`leases`](crate::adapter::Abilities::leases).
    #[track_caller]
    pub fn new(adapter: impl DedupAdapter) -> Self {
        Self::try_new(adapter).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Does the same as [`new`](Self::new), for an adapter that is chosen at run time.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnsupportedByAdapter`] if the adapter has no
    /// [`leases`](crate::adapter::Abilities::leases).
    pub fn try_new(adapter: impl DedupAdapter) -> Result<Self, ConfigError> {
        Ok(Self::with_ledger(Lease::new(Arc::new(adapter))?))
    }

    /// A worker whose keys are permanent before their work runs.
    pub fn on_arrival(adapter: impl DedupAdapter) -> Deduplicator<OnArrival> {
        Deduplicator::with_ledger(OnArrival::new(Arc::new(adapter)))
    }

    /// A worker whose keys commit together with what their work writes.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub fn transactional<A: TransactionAdapter>(
        adapter: A,
    ) -> Deduplicator<Transactional<A::Database>> {
        Deduplicator::with_ledger(Transactional::new(Arc::new(adapter)))
    }
}

impl<L: Ledger> Deduplicator<L> {
    fn with_ledger(ledger: L) -> Self {
        const DAY: Duration = Duration::from_secs(86_400);
        Self {
            ledger: Arc::new(ledger),
            retention: 30 * DAY,
            lease: Duration::from_secs(60),
            store_timeout: Duration::from_secs(2),
        }
    }

    /// How long a key is remembered, from its first claim on.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// How long a claim holds without being renewed, at least 100 ms: how long the work of a
    /// process that died waits for its retry.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.max(Duration::from_millis(100));
        self
    }

    /// The bound on every call to the store, waiting for a connection included.
    pub fn store_timeout(mut self, bound: Duration) -> Self {
        self.store_timeout = bound;
        self
    }

    /// Returns the number of completions and releases that continue in the background.
    pub fn pending_writes(&self) -> usize {
        self.ledger.pending_writes()
    }

    /// Waits until no completion and no release continues in the background, at shutdown.
    pub async fn drain(&self) {
        self.ledger.drain().await;
    }

    /// Runs `work` if the key is new, and makes the key permanent if it succeeds.
    ///
    /// # Errors
    ///
    /// [`RunError::Handler`] if the work failed: its key is free for the next attempt.
    /// [`RunError::Store`] if the store did not answer, or if a transaction could not be
    /// committed: the message is not to be acknowledged.
    pub async fn run<T, E, F>(
        &self,
        key: &DedupKey,
        work: impl FnOnce(RunContext) -> F,
    ) -> Result<RunOutcome<T>, RunError<E>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let context = BeginContext::new(self.retention, self.lease, self.store_timeout);
        let begun = self.ledger.begin(&Keys::one(key.clone()), &context).await;
        let claim = match begun.map_err(RunError::Store)? {
            Begin::First { claim, .. } => claim,
            Begin::Duplicate(known) | Begin::Mismatch(known) => {
                return Ok(RunOutcome::Duplicate(Seen::new(known.age)));
            }
            Begin::InFlight => return Ok(RunOutcome::InFlight),
        };
        let mut extensions = Extensions::new();
        claim.attach(&mut extensions);
        let delivery = claim.delivery().clone();
        match work(RunContext { delivery, extensions }).await {
            Ok(value) => {
                claim.commit(&HandlerSuccess::default()).await.map_err(RunError::Store)?;
                Ok(RunOutcome::First(value))
            }
            Err(error) => {
                // Whether the rollback came through is for the ledger's log.
                let _ = claim.rollback().await;
                Err(RunError::Handler(error))
            }
        }
    }
}

impl<L> Clone for Deduplicator<L> {
    fn clone(&self) -> Self {
        Self { ledger: Arc::clone(&self.ledger), ..*self }
    }
}

impl<L: fmt::Debug> fmt::Debug for Deduplicator<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deduplicator").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}

/// What work can know and use: the counterpart of a request's extensions.
#[derive(Debug)]
pub struct RunContext {
    delivery: Delivery,
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        expect(dead_code, reason = "only transactions are attached")
    )]
    extensions: Extensions,
}

impl RunContext {
    /// The delivery: its attempt, its lease, its derived idempotency keys.
    #[must_use]
    pub fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    /// The transaction that commits with the key.
    ///
    /// # Errors
    ///
    /// [`TxUnavailable::Absent`] under a ledger that is not transactional over this database, and
    /// the others while it is lent.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub fn transaction<DB: sqlx::Database>(&self) -> Result<DedupTx<DB>, TxUnavailable> {
        self.extensions.get::<TxHandle<DB>>().ok_or(TxUnavailable::Absent)?.lend()
    }
}

/// What became of a key's work.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunOutcome<T> {
    /// It ran, and succeeded.
    First(T),
    /// It was done before: acknowledge the message.
    Duplicate(Seen),
    /// It is being done elsewhere, and may fail there: have the message delivered again later.
    InFlight,
}

/// Why a key's work is not done.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The store did not answer, or refused.
    Store(Error),
    /// The work itself failed.
    Handler(E),
}

impl<E> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Store(_) => "the ledger failed",
            Self::Handler(_) => "the work failed",
        })
    }
}

impl<E: std::error::Error + 'static> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::Store(error) => error,
            Self::Handler(error) => error,
        })
    }
}
