//! [`DedupLayer`]: the settings of one deduplicated route.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Method, StatusCode, response};
use http_body_util::Full;

use super::config::{Config, Dress, WithoutResponse};
use super::gate::Gate;
use super::handle::DedupHandle;
use super::mode::Mode;
use super::policy::{OnMismatch, OnMissingKey, OnUnavailable, Success};
#[cfg(feature = "testing")]
use crate::adapter::contract::CallTerms;
use crate::adapter::contract::{DedupAdapter, TransactionAdapter};
use crate::error::ConfigError;
use crate::key::{IntoKeyExtractor, KeyExtractor, KeyPart, LogIds};
use crate::ledger::{
    AnyLedger, CanReplay, FailOpen, Lease, Ledger, OnArrival, TRANSACTIONAL_LEASE, Transactional,
};
use crate::observe::{self, Meters};
use crate::replay::Replay;

/// Makes every delivery to the inner service take effect once.
///
/// | setting | default |
/// |---|---|
/// | [`mode`](Self::mode) | [`Enforce`](crate::Mode::Enforce) |
/// | [`methods`](Self::methods) | the preset's, or POST, PUT, PATCH, DELETE |
/// | [`body_limit`](Self::body_limit) | 2 MiB, or the preset's largest body if that is larger |
/// | [`body_timeout`](Self::body_timeout) | 10 s |
/// | [`retention`](Self::retention) | 30 days, or the preset's floor if that is longer |
/// | [`lease`](Self::lease) | 60 s, renewed at 20 s; [`transactional`](DedupLayer::transactional): 10 s |
/// | [`store_timeout`](Self::store_timeout) | 2 s |
/// | [`handler_timeout`](Self::handler_timeout) | off |
/// | [`max_running`](Self::max_running) | 1,024 |
/// | [`max_waiting`](Self::max_waiting) | 256, and 8 for one key |
/// | [`max_keys`](Self::max_keys) | 4,096 a request |
/// | [`success_when`](Self::success_when) | 2xx |
/// | [`on_missing_key`](Self::on_missing_key) | 400 |
/// | [`wait`](Self::wait) | 2 s |
/// | [`in_flight_status`](Self::in_flight_status) | 503 |
/// | [`retry_after_in_flight`](Self::retry_after_in_flight) | 5 s |
/// | [`on_unavailable`](Self::on_unavailable) | 503 |
/// | [`retry_after_unavailable`](Self::retry_after_unavailable) | 30 s |
/// | [`duplicate_status`](Self::duplicate_status) | 200 |
/// | [`result_header`](Self::result_header) | `x-dedup-result` |
/// | [`compare_payload`](Self::compare_payload) | off: payloads are not compared |
/// | [`replay`](Self::replay) | off: duplicates get an empty response |
/// | [`require_verified`](Self::require_verified) | off |
/// | [`log_ids`](Self::log_ids) | the id; hashed for `idempotency_key` |
/// | [`failures_are_retried`](Self::failures_are_retried) | as the preset's sender does |
///
/// A setter stores its value, and changes no value silently. [`checked`](Self::checked) reports
/// what is invalid, for values from a file or an adapter that is chosen at run time. A layer with
/// an invalid value panics when it is applied to a service.
///
/// # Where it goes
///
/// On the route: `post(handler).layer(dedup)`. The routes under one layer share its keys, and so do
/// layers of one namespace over one store. Give each route that has to see the event its own
/// [namespace](crate::guide::keys#several-endpoints-of-one-sender). Nested layers over different
/// stores that must both claim the event need two namespaces, too. [The
/// guide](crate::guide::how_it_works#the-order-of-layers) has the order of layers.
///
/// # Type parameters
///
/// `L` is the [ledger](crate::ledger): `DedupLayer` alone is a layer under a lease. `B` is the body
/// that the inner service takes.
///
/// # Clone
///
/// A clone is a handle to the same ledger, the same bounds and the same mode.
/// [`max_running`](Self::max_running), [`max_waiting`](Self::max_waiting) and [`mode`](Self::mode)
/// change all clones, services and handles. The other settings are the clone's own.
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
pub struct DedupLayer<L = Lease, B = Full<Bytes>> {
    pub(super) ledger: Arc<AnyLedger>,
    pub(super) config: Config,
    pub(super) gate: Arc<Gate>,
    types: PhantomData<fn() -> (L, B)>,
}

impl DedupLayer {
    /// Deduplicates under a lease: a key becomes permanent when its handler has succeeded.
    ///
    /// Invalid for an adapter without [`leases`](crate::adapter::contract::Abilities::leases).
    pub fn new(key: impl IntoKeyExtractor, adapter: impl DedupAdapter) -> Self {
        Self::under(key, adapter)
    }

    /// Deduplicates on arrival: a key becomes permanent before its handler runs, and an event
    /// whose handler fails is lost.
    ///
    /// Where the same events arrive on several routes or servers of a process, use clones of one
    /// layer. Only clones share which claims have no reply yet. Any other layer treats the key of
    /// such a claim as complete, and the event may be lost.
    pub fn on_arrival(
        key: impl IntoKeyExtractor,
        adapter: impl DedupAdapter,
    ) -> DedupLayer<OnArrival> {
        DedupLayer::under(key, adapter)
    }

    /// Deduplicates in the handler's own transaction: the key and the handler's writes commit
    /// together, or not at all.
    ///
    /// The layer claims under a lease, so it holds no connection while the handler runs. The
    /// handler begins a transaction by [`Delivery::begin`](crate::Delivery::begin) and commits it,
    /// or completes its event by [`Delivery::completion`](crate::Delivery::completion) in a
    /// transaction of another driver. A handler that has nothing to write calls
    /// [`nothing_to_write`](crate::Delivery::nothing_to_write). After any other success, the answer
    /// is 500 with the header value `uncommitted`, and the event is released.
    ///
    /// [`lease`](Self::lease) is 10 s by default: safety does not depend on it.
    /// [The guide](crate::guide::transactions) has an example.
    ///
    /// Invalid for an adapter without
    /// [`completion`](crate::adapter::contract::Abilities::completion).
    pub fn transactional(
        key: impl IntoKeyExtractor,
        adapter: impl TransactionAdapter,
    ) -> DedupLayer<Transactional> {
        DedupLayer::under(key, adapter).lease(TRANSACTIONAL_LEASE)
    }
}

#[cfg(feature = "testing")]
impl<L, B> DedupLayer<L, B> {
    /// Returns the store, the key and the terms of a claim under a token of its own.
    pub(crate) fn claim_parts(&self) -> (&dyn DedupAdapter, &KeyExtractor, CallTerms) {
        let Config { key, times, meters, .. } = &self.config;
        let calls = self.ledger.calls(times, Duration::ZERO, meters);
        (self.ledger.adapter(), key, CallTerms::new(calls.terms))
    }
}

impl<L: Ledger> DedupLayer<L> {
    fn under(key: impl IntoKeyExtractor, adapter: impl DedupAdapter) -> Self {
        Self {
            ledger: AnyLedger::of::<L>(adapter),
            config: Config::new(key.into()),
            gate: Arc::new(Gate::new()),
            types: PhantomData,
        }
    }
}

/// The settings of every layer.
impl<L, B> DedupLayer<L, B> {
    /// Sets the methods that are deduplicated; GET includes HEAD. A request by another method
    /// reaches the inner service with its body buffered, and otherwise unchanged.
    ///
    /// Invalid without a method.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// Sets the longest body, in bytes. A longer one is answered 413, whatever its method, and
    /// nothing is claimed.
    ///
    /// A limit below the [largest body](crate::guide::providers) of the preset's sender is used,
    /// and a warning is logged. A [`VerifyLayer`](crate::verify::VerifyLayer) outside this layer
    /// has a limit of its own: set both.
    ///
    /// axum's extractors of bodies have a limit of 2 MB too (`DefaultBodyLimit`). With the feature
    /// `axum`, a layer with a limit above 2 MiB raises this default to its own, for the routes
    /// inside it. A `DefaultBodyLimit` that the application sets, inside or outside this layer,
    /// takes precedence.
    ///
    /// 0 is invalid.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.config.body_limit = bytes;
        if let Some(largest) = self.config.key.max_body
            && bytes < largest
        {
            observe::records::small_body_limit(&self.config.key.namespace, bytes, largest);
        }
        self
    }

    /// Sets how long a body may take to arrive. A slower one is answered 408, and nothing is
    /// claimed.
    ///
    /// Zero is invalid.
    pub fn body_timeout(mut self, time: Duration) -> Self {
        self.config.body_timeout = time;
        self
    }

    /// Sets how long a key is remembered. The time counts from the key's last claim: every attempt
    /// claims it again.
    ///
    /// A retention below the preset's floor (the time in which its sender may deliver an event
    /// again) is used, and a warning is logged.
    ///
    /// Zero and more than 1,000 years are invalid, and so is a retention below the
    /// [`lease`](Self::lease), except on arrival.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.config.times.retention = retention;
        if let Some(floor) = self.config.key.retention_floor
            && retention < floor
        {
            observe::records::short_retention(&self.config.key.namespace, retention, floor);
        }
        self
    }

    /// Sets how long a claim holds unless it is renewed. If a process dies, the retry of its event
    /// runs after this time.
    ///
    /// The layer renews the lease of a running handler at a third of its length, so a handler may
    /// run for longer than its lease. A handler that hangs holds its event and its permit until the
    /// process ends, unless [`handler_timeout`](Self::handler_timeout) drops it. A lease should be
    /// much longer than [`store_timeout`](Self::store_timeout).
    ///
    /// A lease below 100 ms is invalid, because a busy process may renew later than that.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.times.lease = lease;
        self
    }

    /// Sets the bound on every call to the store, waiting for a connection included. On SQLite, a
    /// transaction may also wait for the write lock before it begins, for up to the
    /// `write_lock_timeout` of `SqliteOptions`.
    ///
    /// Zero is invalid, and so are more than 30 s.
    pub fn store_timeout(mut self, bound: Duration) -> Self {
        self.config.times.store_timeout = bound;
        self
    }

    /// Sets how long a handler may run, from its call to its response.
    ///
    /// After that time, the handler is dropped at an `.await`, its key is released, and the answer
    /// is 504 with the header value `handler-timeout`. The handler may have run in part. The retry
    /// sees an [`attempt`](crate::Delivery::attempt) above 1, and no takeover. A transaction that
    /// it holds is rolled back. Tasks that the handler has spawned continue. The timeout does not
    /// cover the response's body, nor a handler that blocks its thread. Under the on-arrival ledger
    /// the key stays complete, and the event is lost.
    ///
    /// Zero is invalid.
    pub fn handler_timeout(mut self, bound: Duration) -> Self {
        self.config.times.handler_timeout = Some(bound);
        self
    }

    /// Sets how many deliveries may run at once, over all services and clones of this layer. A
    /// delivery beyond that is answered 503. `usize::MAX` bounds nothing.
    ///
    /// 0 is invalid, because every delivery would be answered 503.
    ///
    /// Set it before the layer serves: later, the bound does not become smaller than the number of
    /// deliveries that run then. Running deliveries have tasks of their own, which outer
    /// `ConcurrencyLimit` and `Timeout` layers do not see: this is their bound.
    pub fn max_running(self, deliveries: usize) -> Self {
        self.gate.running.resize(deliveries);
        self
    }

    /// Sets how many deliveries may wait at once for another delivery of their event, over all
    /// services and clones of this layer. A delivery beyond that is answered 503 at once, and so is
    /// the ninth that would wait for one key. Set it before the layer serves, as
    /// [`max_running`](Self::max_running).
    pub fn max_waiting(self, deliveries: usize) -> Self {
        self.gate.waiting.resize(deliveries);
        self
    }

    /// Sets how many keys one request may carry, second identities included. A request with more is
    /// answered 400.
    ///
    /// 0 is invalid.
    pub fn max_keys(mut self, keys: usize) -> Self {
        self.config.max_keys = keys;
        self
    }

    /// Sets which responses of the handler mean that the event was handled. Any other response
    /// releases the key for the retry. A [`Disposition`](crate::Disposition) in the response takes
    /// precedence over this function.
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
        self.config.success = Success(Arc::new(is_success));
        self
    }

    /// Sets what to do with a delivery that carries no key.
    pub fn on_missing_key(mut self, policy: OnMissingKey) -> Self {
        self.config.on_missing_key = policy;
        self
    }

    /// Sets how long a delivery waits for its event in flight, at most a day. Under the default,
    /// most senders never see a failure, because most handlers end within 2 s.
    ///
    /// If the first run succeeds in this time, the answer is 200; if it fails, the handler runs.
    /// After this time, the answer is 503 with `Retry-After`; at once if eight deliveries already
    /// wait for the key. Of the deliveries that wait for an event, one claims it again for all, and
    /// takes a permit to run for each claim. The others hold no permit, and follow one after the
    /// other. Under zero, no delivery waits.
    ///
    /// The event is never acknowledged before it is handled. If the sender must get its 200 at
    /// once, use an [inbox](crate::guide::inbox), a queue, or
    /// [`on_arrival`](DedupLayer::on_arrival), which may lose the event.
    pub fn wait(mut self, bound: Duration) -> Self {
        self.config.wait = bound;
        self
    }

    /// Sets the status of the answer to a delivery whose event is in flight.
    ///
    /// A 1xx is invalid, because it is no final response. So is a 2xx: after it the sender does not
    /// deliver again, although the first run may fail.
    pub fn in_flight_status(mut self, status: StatusCode) -> Self {
        self.config.in_flight_status = status;
        self
    }

    /// Sets the `Retry-After` of the answer to a delivery whose event is in flight, in whole
    /// seconds, rounded up.
    pub fn retry_after_in_flight(mut self, time: Duration) -> Self {
        self.config.retry_after_in_flight = time;
        self
    }

    /// Sets the `Retry-After` of an answer that the store or a bound has caused, in whole seconds,
    /// rounded up.
    pub fn retry_after_unavailable(mut self, time: Duration) -> Self {
        self.config.retry_after_unavailable = time;
        self
    }

    /// Sets the status of the answer to a duplicate.
    ///
    /// Any status but a 2xx is invalid: senders retry other statuses, and some disable the
    /// endpoint.
    pub fn duplicate_status(mut self, status: StatusCode) -> Self {
        self.config.without_response = WithoutResponse::Empty(status);
        self
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
    /// Logs a record if the preset's sender does not sign the id and the key has no second
    /// identity, such as a [content identity](crate::guide::keys#an-id-that-is-not-signed).
    pub fn require_verified(mut self) -> Self {
        if self.config.key.is_replayable() {
            observe::records::unsigned_id(&self.config.key.namespace);
        }
        self.config.require_verified = true;
        self
    }

    /// Sets how log records name an event. The default is its id; for
    /// [`idempotency_key`](Self::idempotency_key) it is [`LogIds::Hashed`], because the keys of
    /// clients may name persons.
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        let KeyExtractor { namespace, tried_once, .. } = &self.config.key;
        self.config.meters = Arc::new(Meters::new(namespace, *tried_once, ids));
        self
    }

    /// States that a layer outside, or your own job, delivers a failed delivery again, although the
    /// preset's sender does not do so after a response. Such a failure is then logged at INFO, and
    /// not as a lost event.
    pub fn failures_are_retried(mut self) -> Self {
        let Config { key, meters, .. } = &mut self.config;
        key.tried_once = false;
        *meters = Arc::new(Meters::new(&key.namespace, false, meters.log_ids));
        self
    }

    /// Makes a layer for the clients of an API: `dress` completes its answers, and a duplicate
    /// whose response was not stored is refused.
    pub(crate) fn dressed(mut self, dress: Dress) -> Self {
        self.config.dress = Some(dress);
        self.config.without_response = WithoutResponse::Refuse;
        self
    }

    /// Sets the page on which the API documents its use of `Idempotency-Key`. The `type` of a
    /// problem is this URL with the value of the result header as its fragment:
    /// `https://api.example.com/docs#mismatch`. One fragment differs: a duplicate whose response
    /// was not stored has `#response-not-stored`. Without a page, the `type` is `about:blank`.
    ///
    /// Any text but an `http` or `https` URL without a fragment is invalid. So is this setting on a
    /// layer that is not one of [`idempotency_key`](Self::idempotency_key).
    pub fn problem_docs(mut self, url: &str) -> Self {
        self.config.problem_docs = Some(url.into());
        self
    }

    /// Changes the body that the inner service takes to another type that is
    /// [`From<Bytes>`](bytes::Bytes).
    ///
    /// By default the body is `Full<Bytes>`, which axum's routers take. A service that takes one
    /// body only needs this, such as axum's `from_fn` inside this layer without a router between
    /// them: `.inner_body::<axum::body::Body>()`.
    pub fn inner_body<T>(self) -> DedupLayer<L, T> {
        let Self { ledger, config, gate, .. } = self;
        DedupLayer { ledger, config, gate, types: PhantomData }
    }
}

impl<L: Ledger, B> DedupLayer<L, B> {
    /// Sets whether the layer enforces its verdicts, only reports them, or does nothing.
    /// [`DedupHandle::set_mode`](crate::DedupHandle::set_mode) changes it while the layer serves.
    ///
    /// In shadow and off, a transaction of the handler's completes nothing: see
    /// [`Delivery::begin`](crate::Delivery::begin).
    pub fn mode(self, mode: Mode) -> Self {
        self.gate.mode.set(mode);
        self
    }

    /// Sets what to do with a delivery when the store is unavailable.
    ///
    /// A duplicate whose stored data cannot be read is 503 under every policy. On the SQL stores,
    /// so is a duplicate whose response is not read within `store_timeout`.
    ///
    /// Not for [`transactional`](Self::transactional) layers: without the database no transaction
    /// completes the event, so this does not compile.
    // The bound is the method's, so that the compiler shows the message of `FailOpen`.
    pub fn on_unavailable(mut self, policy: OnUnavailable) -> Self
    where
        L: FailOpen,
    {
        self.config.on_unavailable = policy;
        self
    }

    /// Compares the payload of a duplicate with the payload under which its event was handled.
    ///
    /// `part` has to be the same: [`key::body_digest()`](crate::key::body_digest) for the whole
    /// body, or the values that matter (`key::json("/amount")`). Name values if the sender puts an
    /// attempt counter or a time into the body (see [`provider`](crate::provider)). In a
    /// multi-event delivery, `part` is read from each event's
    /// [own bytes](crate::key::Event::with_payload). The SHA-256 of `part` is stored with the key.
    /// A value that is absent, null or blank differs from every other value; inside an
    /// [`and`](KeyPart::and), it is an empty part. A delivery whose `part` is malformed is answered
    /// 400. An amount with a fraction is malformed for [`json`](crate::key::json): read it by a
    /// closure.
    ///
    /// A mismatch is counted, logged, and answered as `on_mismatch` says; the handler does not run.
    /// Only payloads of *handled* events are compared. After a failed attempt, the event may come
    /// back with another payload. [The guide](crate::guide::responses#one-id-another-body) has an
    /// example.
    ///
    /// A layer with a [content identity](crate::KeyExtractor::content_identity) stores the SHA-256
    /// of the body in the same place, and reports a mismatch without this setting.
    ///
    /// Invalid for an adapter without
    /// [`stored_data`](crate::adapter::contract::Abilities::stored_data). Under a content identity,
    /// any part but [`key::body_digest()`](crate::key::body_digest) is invalid.
    pub fn compare_payload(mut self, part: KeyPart, on_mismatch: OnMismatch) -> Self {
        self.config.compare_payload = Some(part);
        self.config.on_mismatch = on_mismatch;
        self
    }

    /// Stores the response to the first delivery of an event that succeeds, and answers its
    /// duplicates with it. Some senders use the response: a Telegram bot's method call, the
    /// instructions of a Twilio webhook.
    ///
    /// The response's body is read to its end before the event is completed. If the body ends in an
    /// error, the handler has failed: the answer is 500, and the retry runs.
    /// [The guide](crate::guide::responses#a-response-that-matters) has an example, and the
    /// responses that are not stored. The store then holds the handlers' responses: restrict the
    /// access to it.
    ///
    /// [`on_arrival`](Self::on_arrival) layers cannot replay, because their keys are complete
    /// before there is a response. This does not compile:
    ///
    /// ```compile_fail,E0277
    /// # use tower_dedup::{DedupLayer, Replay, adapter::MemoryAdapter, provider};
    /// let dedup = DedupLayer::on_arrival(provider::TWILIO, MemoryAdapter::new());
    /// let dedup = dedup.replay(Replay::new());
    /// ```
    ///
    /// Invalid for an adapter without
    /// [`stored_data`](crate::adapter::contract::Abilities::stored_data).
    pub fn replay(mut self, replay: Replay) -> Self
    where
        L: CanReplay,
    {
        self.config.replay = Some(Arc::new(replay));
        self
    }

    /// Returns the layer, if it can be applied.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use std::time::Duration;
    /// use tower_dedup::{DedupLayer, adapter::MemoryAdapter, provider};
    ///
    /// let from_a_file = Duration::ZERO;
    /// let dedup = DedupLayer::new(provider::STRIPE, MemoryAdapter::new()).lease(from_a_file);
    /// let error = dedup.checked().unwrap_err().to_string();
    /// assert_eq!(error, "`lease` must be at least 100 ms, not 0ns");
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first setting with an invalid value, and for an adapter that lacks
    /// an ability which a setting needs.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Config { key, times, .. } = &self.config;
        self.config.check(self.ledger.stores_data())?;
        self.gate.check()?;
        self.ledger.check(times, key.has_second_identity())
    }

    /// Returns a handle that counts running deliveries and waits for them at shutdown.
    #[must_use]
    pub fn handle(&self) -> DedupHandle {
        DedupHandle {
            gate: Arc::clone(&self.gate),
            pending_writes: self.ledger.pending_writes().clone(),
            namespace: Arc::clone(&self.config.key.namespace),
        }
    }
}

impl<L, B> Clone for DedupLayer<L, B> {
    fn clone(&self) -> Self {
        let (ledger, gate) = (self.ledger.clone(), Arc::clone(&self.gate));
        Self { ledger, config: self.config.clone(), gate, types: PhantomData }
    }
}

impl<L, B> fmt::Debug for DedupLayer<L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupLayer")
            .field("ledger", &self.ledger)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
