//! [`DedupLayer`]: the settings of one deduplicated route.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, StatusCode, response};
use tower_layer::Layer;

use super::config::Config;
use super::gate::Gate;
use super::handle::DedupHandle;
use super::policy::{LogIds, OnInFlight, OnMismatch, OnMissingKey, OnUnavailable, Replay, Success};
use super::service::Dedup;
use crate::adapter::DedupAdapter;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::TransactionAdapter;
#[cfg(feature = "testing")]
use crate::adapter::{CallTerms, Token};
use crate::error::{ConfigError, valid};
use crate::key::{KeyExtractor, KeyPart};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::ledger::Transactional;
use crate::ledger::{CanReplay, FailOpen, Lease, Ledger, OnArrival};
use crate::observe;

/// Makes every delivery to the inner service take effect once.
///
/// | setting | default |
/// |---|---|
/// | [`methods`](Self::methods) | the preset's, or POST, PUT, PATCH, DELETE |
/// | [`body_limit`](Self::body_limit) | 2 MiB, or the preset's largest body if that is larger |
/// | [`body_timeout`](Self::body_timeout) | 10 s |
/// | [`retention`](Self::retention) | 30 days, or the preset's floor if that is longer |
/// | [`lease`](Self::lease) | 60 s, renewed at 20 s |
/// | [`store_timeout`](Self::store_timeout) | 2 s |
/// | [`handler_timeout`](Self::handler_timeout) | off |
/// | [`max_running`](Self::max_running) | 1,024; [`transactional`](DedupLayer::transactional) on Postgres: the pool's size less two |
/// | [`max_waiting`](Self::max_waiting) | 256 |
/// | [`max_keys`](Self::max_keys) | 4,096 a request |
/// | [`success_when`](Self::success_when) | 2xx |
/// | [`on_missing_key`](Self::on_missing_key) | 400 |
/// | [`on_in_flight`](Self::on_in_flight) | wait 2 s, then answer |
/// | [`in_flight_status`](Self::in_flight_status) | 503 |
/// | [`retry_after_in_flight`](Self::retry_after_in_flight) | 5 s |
/// | [`on_unavailable`](Self::on_unavailable) | 503 |
/// | [`retry_after_unavailable`](Self::retry_after_unavailable) | 30 s |
/// | [`duplicate_status`](Self::duplicate_status) | 200 |
/// | [`result_header`](Self::result_header) | `x-dedup-result` |
/// | [`compare_payload`](Self::compare_payload) | off: payloads are not compared |
/// | [`replay`](Self::replay) | off: duplicates get an empty response |
/// | [`require_verified`](Self::require_verified) | off |
/// | [`log_ids`](Self::log_ids) | hashed |
///
/// A setter panics on an invalid value. Its `try_` variant returns a
/// [`ConfigError`](crate::ConfigError) instead, for values from a file. No setter changes a value
/// silently.
///
/// # Where it goes
///
/// On the route: `post(handler).layer(dedup)`. The routes under one layer share its keys, and so do
/// layers of one namespace over one store. An event that a sender delivers to two such routes runs
/// in one of them; the other answers 200, as to a duplicate. Give each route that has to see the
/// event its own [namespace](crate::guide::keys#several-endpoints-of-one-sender).
///
/// `Router::nest`, for instance, can put the layer around a route twice. Then the inner layer lets
/// requests through that the outer one runs already, and warns. Two layers over different stores
/// that must both claim the event need different namespaces.
///
/// # Type parameter
///
/// `L` is the [ledger](crate::ledger): `DedupLayer` alone is a layer under a lease.
///
/// # Clone
///
/// A clone is a handle to the same ledger and the same bounds. [`max_running`](Self::max_running)
/// and [`max_waiting`](Self::max_waiting) change the bounds of all clones, services and handles at
/// any time. The other settings are the clone's own.
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
    pub(super) ledger: Arc<L>,
    pub(super) config: Config,
    gate: Arc<Gate>,
}

impl DedupLayer {
    /// Deduplicates under a lease: a key becomes permanent when its handler has succeeded.
    ///
    /// # Panics
    ///
    /// If the adapter has no [`leases`](crate::adapter::Abilities::leases);
    /// [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(key: impl Into<KeyExtractor>, adapter: impl DedupAdapter) -> Self {
        valid(Self::try_new(key, adapter))
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

    /// Deduplicates in the handler's own transaction: the key and the handler's writes commit together,
    /// or not at all.
    ///
    /// The handler takes the transaction as a [`DedupTx`](crate::DedupTx) argument. It holds a
    /// connection while it runs, so [`max_running`](Self::max_running) defaults to the size of a
    /// Postgres pool less two, and at least 1. A delivery waits for its permit for up to
    /// [`store_timeout`](Self::store_timeout).
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
        let max_running = adapter.default_max_running();
        let mut layer = DedupLayer::with_ledger(key, Transactional::new(Arc::new(adapter)));
        layer.config.waits_for_permit = true;
        if let Some(deliveries) = max_running {
            layer.gate.set_max_running(deliveries);
        }
        layer
    }
}

#[cfg(feature = "testing")]
impl DedupLayer {
    /// Returns the store, the key and the terms of a claim under a token of its own.
    pub(crate) fn claim_parts(&self) -> (&dyn DedupAdapter, &KeyExtractor, CallTerms) {
        let Config { key, times, .. } = &self.config;
        let terms = CallTerms::on_completion(Token::random(), times.retention, times.lease);
        (self.ledger.adapter(), key, terms)
    }
}

impl<L: Ledger> DedupLayer<L> {
    fn with_ledger(key: impl Into<KeyExtractor>, ledger: L) -> Self {
        Self {
            ledger: Arc::new(ledger),
            config: Config::new(key.into()),
            gate: Arc::new(Gate::new(1_024, 256)),
        }
    }

    /// Returns a handle that counts running deliveries and waits for them at shutdown.
    #[must_use]
    pub fn handle(&self) -> DedupHandle {
        DedupHandle::new(Arc::clone(&self.gate), self.ledger.pending_writes())
    }
}

/// Settings.
impl<L> DedupLayer<L> {
    /// Sets the methods that are deduplicated; GET stands for HEAD too. A request by another method
    /// reaches the inner service with its body buffered, and otherwise as it is.
    ///
    /// # Panics
    ///
    /// If there is no method; [`try_methods`](Self::try_methods) returns an error instead.
    #[track_caller]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        valid(self.try_methods(methods))
    }

    /// Sets the longest body, in bytes. A longer one is answered 413, whatever its method, and
    /// nothing is claimed.
    ///
    /// A limit below the preset's [largest body](crate::provider::Preset::max_body) is used, and a
    /// warning is logged. A [`VerifyLayer`](crate::verify::VerifyLayer) outside this layer has a limit
    /// of its own: set both.
    ///
    /// axum's extractors of bodies have a limit of 2 MB too (`DefaultBodyLimit`). With the feature
    /// `axum`, a layer with a limit above 2 MiB raises axum's limit to its own, for the routes inside
    /// it. A `DefaultBodyLimit` inside this layer decides before it.
    ///
    /// # Panics
    ///
    /// If `bytes` is 0; [`try_body_limit`](Self::try_body_limit) returns an error instead.
    #[track_caller]
    pub fn body_limit(self, bytes: usize) -> Self {
        valid(self.try_body_limit(bytes))
    }

    /// Sets how long a body may take to arrive. A slower one is answered 408, and nothing is
    /// claimed.
    ///
    /// # Panics
    ///
    /// If `time` is zero; [`try_body_timeout`](Self::try_body_timeout) returns an error instead.
    #[track_caller]
    pub fn body_timeout(self, time: Duration) -> Self {
        valid(self.try_body_timeout(time))
    }

    /// Sets how long a key is remembered. The time counts from the key's last claim: every attempt
    /// claims it again.
    ///
    /// A retention below the preset's floor (the time in which its sender may deliver an event
    /// again) is used, and a warning is logged.
    ///
    /// # Panics
    ///
    /// If `retention` is zero; [`try_retention`](Self::try_retention) returns an error instead.
    #[track_caller]
    pub fn retention(self, retention: Duration) -> Self {
        valid(self.try_retention(retention))
    }

    /// Sets how long a claim holds unless it is renewed. If a process dies, the retry of its event
    /// runs after this time.
    ///
    /// The layer renews the lease of a running handler at a third of its length, so a handler may
    /// run for longer than its lease. A handler that hangs holds its event and its permit until the
    /// process ends, unless [`handler_timeout`](Self::handler_timeout) drops it. A lease should be
    /// much longer than [`store_timeout`](Self::store_timeout).
    ///
    /// # Panics
    ///
    /// If `lease` is below 100 ms, because a busy process may renew later than that;
    /// [`try_lease`](Self::try_lease) returns an error instead.
    #[track_caller]
    pub fn lease(self, lease: Duration) -> Self {
        valid(self.try_lease(lease))
    }

    /// Sets the bound on every call to the store, waiting for a connection included.
    ///
    /// # Panics
    ///
    /// If `bound` is zero; [`try_store_timeout`](Self::try_store_timeout) returns an error instead.
    #[track_caller]
    pub fn store_timeout(self, bound: Duration) -> Self {
        valid(self.try_store_timeout(bound))
    }

    /// Sets how long a handler may run, from its call to its response.
    ///
    /// Past that the handler is dropped at an `.await`, its key is released, and the answer is 504
    /// with the header value `handler-timeout`. The handler may have half-run; the retry sees an
    /// [`attempt`](crate::Delivery::attempt) above 1, and no takeover. Tasks that the handler has
    /// spawned go on. The timeout does not cover the response's body, nor a handler that blocks its
    /// thread. Under the on-arrival ledger the key stays complete, and the event is lost.
    ///
    /// # Panics
    ///
    /// If `bound` is zero; [`try_handler_timeout`](Self::try_handler_timeout) returns an error
    /// instead.
    #[track_caller]
    pub fn handler_timeout(self, bound: Duration) -> Self {
        valid(self.try_handler_timeout(bound))
    }

    /// Sets how many deliveries may run at once, over all services and clones of this layer. A
    /// delivery beyond that is answered 503. 0 refuses every delivery; `usize::MAX` bounds nothing.
    ///
    /// It can be changed while deliveries run: those that run beyond a smaller bound run to their
    /// end. Running deliveries have tasks of their own, which outer `ConcurrencyLimit` and `Timeout`
    /// layers do not see: this is their bound.
    pub fn max_running(self, deliveries: usize) -> Self {
        self.gate.set_max_running(deliveries);
        self
    }

    /// Sets how many deliveries may wait at once, over all services and clones of this layer. They
    /// wait for another delivery of their event or, in a transactional layer, for a permit. A
    /// delivery beyond that is answered 503 at once.
    pub fn max_waiting(self, deliveries: usize) -> Self {
        self.gate.set_max_waiting(deliveries);
        self
    }

    /// Sets how many keys one request may carry, second identities included. A request with more is
    /// answered 400.
    ///
    /// # Panics
    ///
    /// If `keys` is 0; [`try_max_keys`](Self::try_max_keys) returns an error instead.
    #[track_caller]
    pub fn max_keys(self, keys: usize) -> Self {
        valid(self.try_max_keys(keys))
    }

    /// Sets which responses of the handler mean that the event was handled. Any other response
    /// releases the key for the retry. A [`Disposition`](crate::Disposition) in the response decides
    /// before this function.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use tower_dedup::{DedupLayer, adapter::MemoryAdapter, provider};
    ///
    /// // 422 is final for this handler: a retry would fail again.
    /// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new())
    ///     .success_when(|response| response.status.is_success() || response.status == 422);
    /// # let _ = dedup;
    /// # }
    /// ```
    pub fn success_when<F>(mut self, is_success: F) -> Self
    where
        F: Fn(&response::Parts) -> bool + Send + Sync + 'static,
    {
        self.config.success = Success::new(is_success);
        self
    }

    /// Sets what to do with a delivery that carries no key.
    pub fn on_missing_key(mut self, policy: OnMissingKey) -> Self {
        self.config.on_missing_key = policy;
        self
    }

    /// Sets what to do with a delivery whose event is in flight.
    pub fn on_in_flight(mut self, policy: OnInFlight) -> Self {
        self.config.on_in_flight = policy;
        self
    }

    /// Sets the status of the answer to a delivery whose event is in flight.
    ///
    /// # Panics
    ///
    /// If it is a 1xx or a 2xx; [`try_in_flight_status`](Self::try_in_flight_status) returns an
    /// error instead.
    #[track_caller]
    pub fn in_flight_status(self, status: StatusCode) -> Self {
        valid(self.try_in_flight_status(status))
    }

    /// Sets the `Retry-After` of the answer to a delivery whose event is in flight, in whole
    /// seconds, rounded up.
    pub fn retry_after_in_flight(mut self, time: Duration) -> Self {
        self.config.retry_after_in_flight = time;
        self
    }

    /// Sets the `Retry-After` of an answer because of the store or a bound, in whole seconds,
    /// rounded up.
    pub fn retry_after_unavailable(mut self, time: Duration) -> Self {
        self.config.retry_after_unavailable = time;
        self
    }

    /// Sets the status of the answer to a duplicate.
    ///
    /// # Panics
    ///
    /// If it is not a 2xx; [`try_duplicate_status`](Self::try_duplicate_status) returns an error
    /// instead.
    #[track_caller]
    pub fn duplicate_status(self, status: StatusCode) -> Self {
        valid(self.try_duplicate_status(status))
    }

    /// Sets the header in which the layer's own answers say why; `None` for no header.
    pub fn result_header(mut self, name: Option<HeaderName>) -> Self {
        self.config.result_header = name;
        self
    }

    /// Answers 500 to every request by a deduplicated method that carries no
    /// [`Verified`](crate::Verified) in its extensions. A layer that verifies signatures belongs
    /// outside this one, and the order is easy to reverse.
    ///
    /// Logs a warning if the preset's sender does not sign the id and the key has no
    /// [second identity](crate::guide::keys#an-id-that-is-not-signed).
    pub fn require_verified(mut self) -> Self {
        if self.config.key.is_replayable() {
            observe::unsigned_id(self.config.key.namespace_str());
        }
        self.config.require_verified = true;
        self
    }

    /// Sets whether log records name an event by its id.
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        self.config.log_ids = ids;
        self
    }

    /// Changes the body that the inner service takes to another type that is
    /// [`From<Bytes>`](bytes::Bytes). The last call: the result is a layer without settings.
    ///
    /// By default the body is `Full<Bytes>`, which axum's routers take. A service that takes one
    /// body only needs this, such as axum's `from_fn` inside this layer without a router between
    /// them: `.inner_body::<axum::body::Body>()`.
    pub fn inner_body<B>(self) -> WithInnerBody<L, B> {
        WithInnerBody { layer: self, inner_body: PhantomData }
    }
}

impl<L: Ledger> DedupLayer<L> {
    /// Sets what to do with a delivery when the store is unavailable.
    ///
    /// A duplicate whose stored data cannot be read is 503 under every policy. On the SQL stores, so is a
    /// duplicate whose response is not read within `store_timeout`.
    ///
    /// Not for [`transactional`](Self::transactional) layers: without the database there is no
    /// transaction to lend, so this does not compile.
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
    /// Compares the payload of a duplicate with the payload under which its event was handled.
    ///
    /// `part` has to be the same: [`key::body_digest()`](crate::key::body_digest) for the whole
    /// body, or the values that matter (`key::json("/amount")`). Name values if the sender puts an
    /// attempt counter or a time into the body (see [`provider`](crate::provider)). In a
    /// multi-event delivery, `part` is read from each event's
    /// [own bytes](crate::key::Event::with_payload). The SHA-256 of `part` is stored with the key. A
    /// delivery without `part` is not compared.
    ///
    /// A mismatch is counted, logged, and answered as `on_mismatch` says; the handler does not run.
    /// Only payloads of *handled* events are compared. After a failed attempt, the event may come
    /// back with another payload.
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
    /// If the adapter has no [`stored_data`](crate::adapter::Abilities::stored_data);
    /// [`try_compare_payload`](Self::try_compare_payload) returns an error instead.
    #[track_caller]
    pub fn compare_payload(self, part: KeyPart, on_mismatch: OnMismatch) -> Self {
        valid(self.try_compare_payload(part, on_mismatch))
    }
}

impl<L: Ledger> DedupLayer<L> {
    /// Stores the response to the first delivery of an event that succeeds, and answers its
    /// duplicates with it. Some senders use the response: a Telegram bot's method call, the
    /// instructions of a Twilio webhook.
    ///
    /// The response's body is read to its end before the event is completed. If the body ends in an
    /// error, the handler has failed: the answer is 500, and the retry runs. The response to a
    /// multi-event delivery is not stored. Not for [`on_arrival`](Self::on_arrival) layers, whose
    /// keys are complete before there is a response: this does not compile.
    ///
    /// The store then holds the handlers' responses: restrict the access to it.
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
    /// If the adapter has no [`stored_data`](crate::adapter::Abilities::stored_data);
    /// [`try_replay`](Self::try_replay) returns an error instead.
    #[track_caller]
    pub fn replay(self, replay: Replay) -> Self
    where
        L: CanReplay,
    {
        valid(self.try_replay(replay))
    }
}

impl<L> DedupLayer<L> {
    fn service<S, B>(&self, inner: S) -> Dedup<S, L, B> {
        Dedup::new(inner, Arc::clone(&self.ledger), self.config.clone(), Arc::clone(&self.gate))
    }
}

impl<S, L> Layer<S> for DedupLayer<L> {
    type Service = Dedup<S, L>;

    fn layer(&self, inner: S) -> Self::Service {
        self.service(inner)
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

/// A [`DedupLayer`] whose inner service takes the body `B`: made by
/// [`inner_body`](DedupLayer::inner_body).
///
/// Cloning makes another handle, as with [`DedupLayer`].
#[must_use = "a layer does nothing until it wraps a service"]
pub struct WithInnerBody<L, B> {
    layer: DedupLayer<L>,
    inner_body: PhantomData<fn() -> B>,
}

impl<S, L, B> Layer<S> for WithInnerBody<L, B> {
    type Service = Dedup<S, L, B>;

    fn layer(&self, inner: S) -> Self::Service {
        self.layer.service(inner)
    }
}

impl<L, B> Clone for WithInnerBody<L, B> {
    fn clone(&self) -> Self {
        Self { layer: self.layer.clone(), inner_body: PhantomData }
    }
}

impl<L: fmt::Debug, B> fmt::Debug for WithInnerBody<L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithInnerBody").field(&self.layer).finish()
    }
}
