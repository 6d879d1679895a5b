//! [`DedupLayer`]: the configuration of one deduplicated route, and the bounds it shares.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, StatusCode};
use tower_layer::Layer;

use super::config::{ComparedPart, Config};
use super::gate::Gate;
use super::handle::DedupHandle;
use super::policy::{LogIds, OnInFlight, OnMismatch, OnMissingKey, OnUnavailable, Replay, Success};
use super::service::Dedup;
use crate::adapter::DedupAdapter;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::TransactionAdapter;
use crate::error::ConfigError;
use crate::key::{KeyExtractor, KeyPart};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::ledger::Transactional;
use crate::ledger::{CanReplay, FailOpen, Lease, Ledger, OnArrival};
use crate::observe;

/// Below this a lease lapses between two renewals on a busy machine.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// Makes every delivery to the inner service take effect once.
///
/// | setting | default |
/// |---|---|
/// | [`methods`](Self::methods) | the preset's, or POST, PUT, PATCH, DELETE |
/// | [`body_limit`](Self::body_limit) | 2 MiB |
/// | [`body_timeout`](Self::body_timeout) | 10 s |
/// | [`retention`](Self::retention) | 30 days, or the preset's floor if that is longer |
/// | [`lease`](Self::lease) | 60 s, renewed at 20 s |
/// | [`store_timeout`](Self::store_timeout) | 2 s |
/// | [`max_running`](Self::max_running) | 1,024 |
/// | [`max_waiting`](Self::max_waiting) | 256 |
/// | [`max_keys`](Self::max_keys) | 4,096 a request |
/// | [`success_when`](Self::success_when) | 2xx |
/// | [`on_missing_key`](Self::on_missing_key) | 400 |
/// | [`on_in_flight`](Self::on_in_flight) | wait 2 s, then 503 with `Retry-After: 5` |
/// | [`on_unavailable`](Self::on_unavailable) | 503 with `Retry-After: 30` |
/// | [`duplicate_status`](Self::duplicate_status) | 200 |
/// | [`result_header`](Self::result_header) | `x-dedup-result` |
/// | [`compare_payload`](Self::compare_payload) | off: payloads are not compared |
/// | [`replay`](Self::replay) | off: duplicates get an empty response |
/// | [`require_verified`](Self::require_verified) | off |
/// | [`log_ids`](Self::log_ids) | hashed |
///
/// # Where it goes
///
/// On the route: `post(handler).layer(dedup)`. The routes under one layer share its keys, and so do
/// layers of one namespace over one store. An event that a sender delivers to two such routes runs
/// in one of them; the other answers 200 as to a duplicate. Give each route that has to see it a
/// [namespace](crate::guide::keys#several-endpoints-of-one-sender).
///
/// Around a route twice, by `Router::nest` for instance, the inner layer of one namespace lets
/// requests through that the outer one runs already, and warns. Two layers over different stores,
/// of which each is to look, need different namespaces.
///
/// # Type parameter
///
/// `L` is the [ledger](crate::ledger): `DedupLayer` alone is a layer under a lease.
///
/// # Clone
///
/// A clone shares the ledger and the bounds with its original; setting a bound on either gives
/// that one bounds of its own.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")] {
/// use std::time::Duration;
/// use axum::Router;
/// use axum::routing::post;
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupLayer, key};
///
/// let dedup = DedupLayer::new(key::header("webhook-id").namespace("acme"), MemoryAdapter::new())
///     .retention(Duration::from_secs(14 * 86_400))
///     .body_limit(256 * 1024);
/// let app: Router = Router::new().route("/hook", post(async || "done").layer(dedup));
/// # let _ = app;
/// # }
/// ```
#[must_use = "a layer does nothing until it wraps a service"]
pub struct DedupLayer<L = Lease> {
    ledger: Arc<L>,
    config: Config,
    gate: Arc<Gate>,
}

impl DedupLayer {
    /// Deduplicates under a lease: a key becomes permanent when its handler has succeeded.
    ///
    /// # Panics
    ///
    /// Panics if the adapter has no [`leases`](crate::adapter::Abilities::leases).
    #[track_caller]
    pub fn new(key: impl Into<KeyExtractor>, adapter: impl DedupAdapter) -> Self {
        supported(Self::try_new(key, adapter))
    }

    /// Does the same as [`new`](Self::new), for an adapter that is chosen at run time.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnsupportedByAdapter`] if the adapter has no
    /// [`leases`](crate::adapter::Abilities::leases).
    pub fn try_new(
        key: impl Into<KeyExtractor>,
        adapter: impl DedupAdapter,
    ) -> Result<Self, ConfigError> {
        Ok(Self::with_ledger(key, Lease::new(Arc::new(adapter))?))
    }

    /// Deduplicates on arrival: a key becomes permanent before its handler runs, and an event
    /// whose handler fails is lost.
    pub fn on_arrival(
        key: impl Into<KeyExtractor>,
        adapter: impl DedupAdapter,
    ) -> DedupLayer<OnArrival> {
        DedupLayer::with_ledger(key, OnArrival::new(Arc::new(adapter)))
    }

    /// Deduplicates in the handler's own transaction: the key and what the handler writes commit
    /// together, or not at all.
    ///
    /// The handler takes the transaction as a [`DedupTx`](crate::DedupTx) argument.
    ///
    /// ```no_run
    /// # #[cfg(all(feature = "axum", feature = "postgres"))] {
    /// use axum::Router;
    /// use axum::http::StatusCode;
    /// use axum::routing::post;
    /// use sqlx::{PgPool, Postgres};
    /// use tower_dedup::adapter::PostgresAdapter;
    /// use tower_dedup::{DedupLayer, DedupTx, provider};
    ///
    /// async fn on_event(mut tx: DedupTx<Postgres>) -> StatusCode {
    ///     match sqlx::query("UPDATE orders SET paid = true").execute(&mut *tx).await {
    ///         Ok(_) => StatusCode::OK,
    ///         Err(_) => StatusCode::INTERNAL_SERVER_ERROR, // rolled back; the retry runs again
    ///     }
    /// }
    ///
    /// # fn app(pool: PgPool) -> Router {
    /// let dedup = DedupLayer::transactional(provider::STRIPE, PostgresAdapter::new(pool));
    /// Router::new().route("/webhooks/stripe", post(on_event).layer(dedup))
    /// # }
    /// # let _ = app;
    /// # }
    /// ```
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub fn transactional<A: TransactionAdapter>(
        key: impl Into<KeyExtractor>,
        adapter: A,
    ) -> DedupLayer<Transactional<A::Database>> {
        DedupLayer::with_ledger(key, Transactional::new(Arc::new(adapter)))
    }
}

#[track_caller]
fn supported<T>(built: Result<T, ConfigError>) -> T {
    built.unwrap_or_else(|error| panic!("{error}"))
}

impl<L: Ledger> DedupLayer<L> {
    fn with_ledger(key: impl Into<KeyExtractor>, ledger: L) -> Self {
        Self {
            ledger: Arc::new(ledger),
            config: Config::new(key.into()),
            gate: Arc::new(Gate::new(1_024, 256)),
        }
    }
}

impl<L> DedupLayer<L> {
    /// The methods that are deduplicated; GET stands for HEAD too. Requests by any other reach the
    /// inner service as they are, but for having been buffered.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// The largest body, in bytes; a larger one is answered 413 and nothing is recorded. Holds for
    /// every request, whatever its method.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.config.body_limit = bytes;
        self
    }

    /// How long a body may take to arrive; a slower one is answered 408 and nothing is recorded.
    pub fn body_timeout(mut self, time: Duration) -> Self {
        self.config.body_timeout = time;
        self
    }

    /// How long a key is remembered, from its first delivery on.
    ///
    /// A retention below the preset's floor (the time in which its sender may deliver an event
    /// again) is warned about and taken. One of zero remembers nothing.
    pub fn retention(mut self, retention: Duration) -> Self {
        if let Some(floor) = self.config.key.floor()
            && retention < floor
        {
            observe::short_retention(self.config.key.namespace_str(), retention, floor);
        }
        self.config.retention = retention;
        self
    }

    /// How long a claim holds without being renewed: how long the event of a process that died
    /// waits for its retry to run. At least 100 ms.
    ///
    /// A running handler renews it at a third of its length, so a handler may take much longer: as
    /// long as it likes, and a handler that hangs keeps its event and its permit until the process
    /// ends. Put a timeout *inside* this layer to bound that. A lease should be much longer than
    /// [`store_timeout`](Self::store_timeout).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease.max(SHORTEST_LEASE);
        self
    }

    /// The bound on every call to the store, waiting for a connection included.
    pub fn store_timeout(mut self, bound: Duration) -> Self {
        self.config.store_timeout = bound;
        self
    }

    /// How many deliveries may run at once, over all routes and clones; the rest is answered 503.
    ///
    /// Deliveries that wait run in tasks of their own, which outer `ConcurrencyLimit` and `Timeout` layers
    /// do not see: this is their bound.
    pub fn max_running(mut self, deliveries: usize) -> Self {
        self.gate = Arc::new(Gate::new(deliveries, self.gate.max_waiting()));
        self
    }

    /// How many deliveries may wait at once for another delivery of their event; the rest is
    /// answered 503 at once.
    pub fn max_waiting(mut self, deliveries: usize) -> Self {
        self.gate = Arc::new(Gate::new(self.gate.max_running(), deliveries));
        self
    }

    /// How many keys one request may carry, second identities included; more are answered 400.
    pub fn max_keys(mut self, keys: usize) -> Self {
        self.config.max_keys = keys;
        self
    }

    /// Which statuses of the handler mean that the event was handled. Any other frees the key for
    /// the retry.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use tower_dedup::{DedupLayer, adapter::MemoryAdapter, provider};
    ///
    /// // 422 is final for this handler: no retry would end otherwise.
    /// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new())
    ///     .success_when(|status| status.is_success() || status == 422);
    /// # let _ = dedup;
    /// # }
    /// ```
    pub fn success_when<F>(mut self, is_success: F) -> Self
    where
        F: Fn(StatusCode) -> bool + Send + Sync + 'static,
    {
        self.config.success = Success::new(is_success);
        self
    }

    /// What to do with a delivery that carries no key.
    pub fn on_missing_key(mut self, policy: OnMissingKey) -> Self {
        self.config.on_missing_key = policy;
        self
    }

    /// What to do with a delivery whose event is running already.
    pub fn on_in_flight(mut self, policy: OnInFlight) -> Self {
        self.config.on_in_flight = policy;
        self
    }

    /// The `Retry-After` of a 503, in whole seconds: `in_flight` where the event is running
    /// elsewhere, `unavailable` where the store or a bound is the reason.
    pub fn retry_after(mut self, in_flight: Duration, unavailable: Duration) -> Self {
        self.config.retry_after_in_flight = in_flight;
        self.config.retry_after_unavailable = unavailable;
        self
    }

    /// The status of the answer to a completed duplicate.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidDuplicateStatus`] if it is not a 2xx: senders retry anything else,
    /// and some switch the endpoint off.
    pub fn duplicate_status(mut self, status: StatusCode) -> Result<Self, ConfigError> {
        if !status.is_success() {
            return Err(ConfigError::InvalidDuplicateStatus);
        }
        self.config.duplicate_status = status;
        Ok(self)
    }

    /// The header in which the layer's own answers say why; `None` for none.
    pub fn result_header(mut self, name: Option<HeaderName>) -> Self {
        self.config.result_header = name;
        self
    }

    /// Refuses, with a 500, every request by a deduplicated method that carries no
    /// [`Verified`](crate::Verified) in its extensions: a layer that verifies signatures has to sit
    /// outside this one, and the order is easy to get backwards.
    pub fn require_verified(mut self) -> Self {
        self.config.require_verified = true;
        self
    }

    /// Whether log events name an event by its id.
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        self.config.log_ids = ids;
        self
    }

    /// Makes the inner service's body another type: one that is [`From<Bytes>`](Bytes).
    ///
    /// Needed where the inner service takes one body only, such as axum's `from_fn` when it sits
    /// inside this layer without a router between them: `.inner_body::<axum::body::Body>()`.
    /// It is the last call of a chain: it returns a layer without settings.
    pub fn inner_body<B>(self) -> InnerBody<L, B> {
        InnerBody { layer: self, body: PhantomData }
    }
}

impl<L: Ledger> DedupLayer<L> {
    /// What to do with a delivery when the store does not answer.
    ///
    /// Not for [`transactional`](Self::transactional) layers: without the database there is no
    /// transaction to lend, and this does not compile.
    // The bound is the method's, so that the compiler shows the message of `FailOpen`.
    pub fn on_unavailable(mut self, policy: OnUnavailable) -> Self
    where
        L: FailOpen,
    {
        self.config.on_unavailable = policy;
        self
    }
}

impl<L: Ledger> DedupLayer<L> {
    /// Compares the payload of a delivery with that under which its event was handled.
    ///
    /// `part` is what has to be the same: [`key::body_digest()`](crate::key::body_digest) for the
    /// whole body, or the values that matter (`key::json("/amount")`), where a sender counts its
    /// attempts or tells the time in the body (see [`provider`](crate::provider)). In a batch, it is
    /// read from each event's [own bytes](crate::key::Event::with_payload). Its SHA-256 is kept
    /// with the key from then on; a delivery that does not carry `part` is not compared.
    ///
    /// A mismatch is counted, logged, and answered as `on_mismatch` says; the handler does not run.
    /// Compared is what has been *handled*: an event whose first handler failed may come again with
    /// another payload.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use tower_dedup::{DedupLayer, OnMismatch, adapter::MemoryAdapter, key, provider};
    ///
    /// let dedup = DedupLayer::new(provider::STRIPE, MemoryAdapter::new())
    ///     .compare_payload(key::body_digest(), OnMismatch::Refuse);
    /// # let _ = dedup;
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the adapter has no [`stored_data`](crate::adapter::Abilities::stored_data).
    #[track_caller]
    pub fn compare_payload(self, part: KeyPart, on_mismatch: OnMismatch) -> Self {
        supported(self.try_compare_payload(part, on_mismatch))
    }

    /// Does the same as [`compare_payload`](Self::compare_payload), for an adapter that is chosen at
    /// run time.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnsupportedByAdapter`] if the adapter has no
    /// [`stored_data`](crate::adapter::Abilities::stored_data).
    pub fn try_compare_payload(
        mut self,
        part: KeyPart,
        on_mismatch: OnMismatch,
    ) -> Result<Self, ConfigError> {
        self.check_stored_data()?;
        self.config.compare_payload = Some(ComparedPart { part, on_mismatch });
        Ok(self)
    }

    fn check_stored_data(&self) -> Result<(), ConfigError> {
        if self.ledger.stores_data() {
            return Ok(());
        }
        Err(ConfigError::UnsupportedByAdapter("stored data"))
    }
}

impl<L: Ledger> DedupLayer<L> {
    /// Keeps the response to the first delivery of an event that succeeds, and answers its
    /// duplicates with it, for senders to whom the answer matters: a Telegram bot's
    /// method call, the instructions of a Twilio webhook.
    ///
    /// The response's body is read to its end before the event is completed. If it ends in an
    /// error, the handler has failed: the delivery is answered 500, and the retry runs. That of a
    /// batch is not kept. Not for [`on_arrival`](Self::on_arrival) layers, whose keys are complete
    /// before there is a response: this does not compile.
    ///
    /// A duplicate reads the response from the store. The store holds what handlers answer: mind who
    /// may read it.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use tower_dedup::{DedupLayer, Replay, adapter::MemoryAdapter, provider};
    ///
    /// let dedup = DedupLayer::new(provider::TWILIO, MemoryAdapter::new())
    ///     .replay(Replay::new().body_limit(16 * 1024));
    /// # let _ = dedup;
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the adapter has no [`stored_data`](crate::adapter::Abilities::stored_data).
    #[track_caller]
    pub fn replay(self, replay: Replay) -> Self
    where
        L: CanReplay,
    {
        supported(self.try_replay(replay))
    }

    /// Does the same as [`replay`](Self::replay), for an adapter that is chosen at run time.
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnsupportedByAdapter`] if the adapter has no
    /// [`stored_data`](crate::adapter::Abilities::stored_data).
    pub fn try_replay(mut self, replay: Replay) -> Result<Self, ConfigError>
    where
        L: CanReplay,
    {
        self.check_stored_data()?;
        self.config.replay = Some(replay);
        Ok(self)
    }
}

impl<L: Ledger> DedupLayer<L> {
    /// A handle that waits for running deliveries at shutdown.
    ///
    /// Take it last: a bound that is set later gives the layer bounds of its own, which this
    /// handle does not watch.
    #[must_use]
    pub fn handle(&self) -> DedupHandle {
        DedupHandle::new(&self.gate, &self.ledger)
    }
}

impl<S, L> Layer<S> for DedupLayer<L> {
    type Service = Dedup<S, L>;

    fn layer(&self, inner: S) -> Self::Service {
        Dedup::new(inner, Arc::clone(&self.ledger), self.config.clone(), Arc::clone(&self.gate))
    }
}

impl<L> Clone for DedupLayer<L> {
    fn clone(&self) -> Self {
        Self {
            ledger: Arc::clone(&self.ledger),
            config: self.config.clone(),
            gate: Arc::clone(&self.gate),
        }
    }
}

impl<L: fmt::Debug> fmt::Debug for DedupLayer<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupLayer")
            .field("ledger", &self.ledger)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// A [`DedupLayer`] whose inner service takes the body `B`. Made by
/// [`inner_body`](DedupLayer::inner_body).
#[must_use = "a layer does nothing until it wraps a service"]
pub struct InnerBody<L, B> {
    layer: DedupLayer<L>,
    body: PhantomData<fn() -> B>,
}

impl<S, L, B> Layer<S> for InnerBody<L, B> {
    type Service = Dedup<S, L, B>;

    fn layer(&self, inner: S) -> Self::Service {
        let DedupLayer { ledger, config, gate } = &self.layer;
        Dedup::new(inner, Arc::clone(ledger), config.clone(), Arc::clone(gate))
    }
}

impl<L, B> Clone for InnerBody<L, B> {
    fn clone(&self) -> Self {
        Self { layer: self.layer.clone(), body: PhantomData }
    }
}

impl<L: fmt::Debug, B> fmt::Debug for InnerBody<L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InnerBody").field("layer", &self.layer).finish()
    }
}
