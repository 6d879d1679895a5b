//! [`DedupSettings`]: what a layer around a [`DedupLayer`] has to know of it.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Method};
use http_body::Body;

use super::body::Collect;
use super::builder::DedupLayer;
use super::config::Config;
use super::policy::OnUnavailable;
use super::request::caught;
use crate::error::BoxError;
use crate::key::{Extracted, Keys, RequestRef};

/// The settings of a [`DedupLayer`], for a layer around it that has to agree with it, such as one
/// that stores deliveries before they are handled: see [`DedupLayer::settings`].
///
/// The mode changes while a layer serves, and is that of its [handle](crate::DedupHandle::mode).
#[derive(Clone, Copy)]
pub struct DedupSettings<'l>(&'l Config);

impl<L, B> DedupLayer<L, B> {
    /// Returns the settings of this layer, for a layer around it.
    ///
    /// ```
    /// # #[cfg(feature = "memory")] {
    /// use tower_dedup::{DedupLayer, adapter::MemoryAdapter, provider};
    ///
    /// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new());
    /// assert_eq!(dedup.settings().namespace(), "github");
    /// assert!(dedup.settings().deduplicates(&http::Method::POST));
    /// # }
    /// ```
    #[must_use]
    pub fn settings(&self) -> DedupSettings<'_> {
        DedupSettings(&self.config)
    }
}

impl<'l> DedupSettings<'l> {
    /// Returns the keys of a request, as the layer reads them; `None` for a request without a key,
    /// and for one that the layer refuses: with a malformed key or too many, or if a closure of the
    /// extractor panics.
    #[must_use]
    pub fn keys(&self, request: &RequestRef<'_>) -> Option<Keys> {
        match caught(|| self.0.key.read(request)) {
            Ok(Extracted::Keys(keys)) if keys.identity_count() <= self.0.max_keys => Some(keys),
            _ => None,
        }
    }

    /// Returns the namespace of the keys, without the part of a
    /// [`namespace_by`](crate::KeyExtractor::namespace_by).
    #[must_use]
    pub fn namespace(&self) -> &'l str {
        &self.0.key.namespace
    }

    /// Returns how long a key is remembered.
    #[must_use]
    pub fn retention(&self) -> Duration {
        self.0.times.retention
    }

    /// Returns how long the sender of the preset may deliver an event again; `None` without a
    /// preset.
    #[must_use]
    pub fn retention_floor(&self) -> Option<Duration> {
        self.0.key.retention_floor
    }

    /// Returns `true` for a method that is deduplicated. GET stands for HEAD, too.
    #[must_use]
    pub fn deduplicates(&self, method: &Method) -> bool {
        self.0.deduplicates(method)
    }

    /// Buffers a request's body within the bounds of the layer.
    ///
    /// # Errors
    ///
    /// The body is too large, too slow or broken. The layer refuses a body that ends in this error
    /// as it refuses a body of that fault.
    pub async fn collect<R>(&self, body: R) -> Result<Bytes, BoxError>
    where
        R: Body<Data = Bytes>,
        R::Error: Into<BoxError>,
    {
        let mut body = pin!(Collect::new(body, self.0.body_limit, self.0.body_timeout));
        Ok(poll_fn(|cx| body.as_mut().poll(cx)).await?)
    }

    /// Returns the header in which the layer's own answers say why.
    #[must_use]
    pub fn result_header(&self) -> Option<&'l HeaderName> {
        self.0.result_header.as_ref()
    }

    /// Returns `true` if duplicates get the response to the first delivery.
    #[must_use]
    pub fn replays(&self) -> bool {
        self.0.replay.is_some()
    }

    /// Returns `true` for a layer of [`idempotency_key`](DedupLayer::idempotency_key), whose
    /// clients wait for the response.
    #[must_use]
    pub fn is_of_clients(&self) -> bool {
        self.0.dress.is_some()
    }

    /// Returns `true` if a request has to carry [`Verified`](crate::Verified).
    #[must_use]
    pub fn requires_verified(&self) -> bool {
        self.0.require_verified
    }

    /// Returns what happens to a delivery when the store is unavailable.
    #[must_use]
    pub fn on_unavailable(&self) -> OnUnavailable {
        self.0.on_unavailable
    }
}

impl fmt::Debug for DedupSettings<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
