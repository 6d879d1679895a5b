//! [`DedupLayer`]: the settings of one deduplicated route.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;

use super::config::Config;
use super::gate::Gate;
use super::handle::DedupHandle;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::TransactionAdapter;
use crate::adapter::contract::DedupAdapter;
#[cfg(feature = "testing")]
use crate::adapter::contract::{CallTerms, Token};
use crate::error::ConfigError;
use crate::key::IntoKeyExtractor;
#[cfg(feature = "testing")]
use crate::key::KeyExtractor;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::ledger::Transactional;
use crate::ledger::{Lease, Ledger, OnArrival};

/// Makes every delivery to the inner service take effect once.
///
/// | setting | default |
/// |---|---|
/// | [`mode`](Self::mode) | [`Enforce`](crate::Mode::Enforce) |
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
/// | [`handshakes_to_handler`](Self::handshakes_to_handler) | off: the layer answers them |
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
/// | [`log_ids`](Self::log_ids) | the id; hashed for `idempotency_key` |
///
/// A setter stores its value, and changes no value silently. [`checked`](Self::checked) reports what is invalid, for
/// values from a file or an adapter that is chosen at run time. A layer with an invalid value panics when it is applied
/// to a service.
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
/// # Type parameters
///
/// `L` is the [ledger](crate::ledger): `DedupLayer` alone is a layer under a lease. `B` is the body that the inner
/// service takes.
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
    pub(super) ledger: Arc<L>,
    pub(super) config: Config,
    pub(super) gate: Arc<Gate>,
    inner_body: PhantomData<fn() -> B>,
}

impl DedupLayer {
    /// Deduplicates under a lease: a key becomes permanent when its handler has succeeded.
    ///
    /// Invalid for an adapter without [`leases`](crate::adapter::contract::Abilities::leases).
    pub fn new(key: impl IntoKeyExtractor, adapter: impl DedupAdapter) -> Self {
        Self::with_ledger(key, Lease::new(Arc::new(adapter)))
    }

    /// Deduplicates on arrival: a key becomes permanent before its handler runs, and an event
    /// whose handler fails is lost.
    pub fn on_arrival(
        key: impl IntoKeyExtractor,
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
    /// [`store_timeout`](Self::store_timeout). [The guide](crate::guide::transactions#use) has an example.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub fn transactional<A: TransactionAdapter>(
        key: impl IntoKeyExtractor,
        adapter: A,
    ) -> DedupLayer<Transactional<A::Database>> {
        let max_running = adapter.default_max_running();
        let mut layer = DedupLayer::with_ledger(key, Transactional::new(Arc::new(adapter)));
        layer.config.waits_for_permit = true;
        if let Some(deliveries) = max_running {
            layer.gate.running.resize(deliveries);
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
    fn with_ledger(key: impl IntoKeyExtractor, ledger: L) -> Self {
        Self {
            ledger: Arc::new(ledger),
            config: Config::new(key.into()),
            gate: Arc::new(Gate::new()),
            inner_body: PhantomData,
        }
    }
}

impl<L: Ledger, B> DedupLayer<L, B> {
    /// Returns the layer, if it can be applied.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use std::time::Duration;
    /// use tower_dedup::{DedupLayer, adapter::MemoryAdapter, provider};
    ///
    /// let from_a_file = Duration::ZERO;
    /// let dedup = DedupLayer::new(provider::STRIPE, MemoryAdapter::new()).lease(from_a_file);
    /// assert_eq!(dedup.checked().unwrap_err().to_string(), "`lease` must be at least 100 ms");
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first setting with an invalid value, and for an adapter that lacks an ability which a
    /// setting needs.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.ledger.check()?;
        self.config.check(self.ledger.stores_data())
    }

    /// Returns a handle that counts running deliveries and waits for them at shutdown.
    #[must_use]
    pub fn handle(&self) -> DedupHandle {
        DedupHandle {
            gate: Arc::clone(&self.gate),
            pending_writes: self.ledger.pending_writes(),
            namespace: Arc::clone(&self.config.key.namespace),
            can_shadow: L::CAN_SHADOW,
        }
    }
}

impl<L, B> DedupLayer<L, B> {
    /// Changes the body that the inner service takes to another type that is
    /// [`From<Bytes>`](bytes::Bytes).
    ///
    /// By default the body is `Full<Bytes>`, which axum's routers take. A service that takes one
    /// body only needs this, such as axum's `from_fn` inside this layer without a router between
    /// them: `.inner_body::<axum::body::Body>()`.
    pub fn inner_body<T>(self) -> DedupLayer<L, T> {
        let Self { ledger, config, gate, .. } = self;
        DedupLayer { ledger, config, gate, inner_body: PhantomData }
    }
}

impl<L, B> Clone for DedupLayer<L, B> {
    fn clone(&self) -> Self {
        let (ledger, gate) = (Arc::clone(&self.ledger), Arc::clone(&self.gate));
        Self { ledger, config: self.config.clone(), gate, inner_body: PhantomData }
    }
}

impl<L: fmt::Debug, B> fmt::Debug for DedupLayer<L, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DedupLayer")
            .field("ledger", &self.ledger)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
