//! Policies: what the layer does where there is a choice.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode, header};

use crate::error::ConfigError;

/// What to do with a delivery that carries no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Answer 400. Nothing is recorded.
    #[default]
    Reject,
    /// Run the handler, unprotected from duplicates.
    PassThrough,
    /// Know the delivery by the SHA-256 of its raw body. An empty body is answered 400: all empty
    /// bodies have one digest, and the second such delivery would be lost.
    ///
    /// Many senders put an attempt counter or a time into the body of a retry, and some send two
    /// real events with the same bytes.
    BodyDigest,
}

/// What to do with a delivery whose event is running already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnInFlight {
    /// Wait for the first run to end, up to this long, and begin again: 200 if it succeeded, run
    /// the handler if it failed. Past the bound, 503 with `Retry-After`.
    ///
    /// The default, with two seconds: most handlers end within it, so the sender never sees a
    /// failure.
    Wait(Duration),
    /// Answer 503 with `Retry-After` at once.
    Reject,
    /// Answer as to a completed duplicate. **If the first run then fails and the sender does not
    /// deliver again, the event is lost.**
    Acknowledge,
}

impl Default for OnInFlight {
    fn default() -> Self {
        Self::Wait(Duration::from_secs(2))
    }
}

/// What to do with a delivery when the store does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// Answer 503 with `Retry-After`: the sender comes again.
    #[default]
    Closed,
    /// Run the handler, unprotected from duplicates. The key is still recorded afterwards if the
    /// store answers by then.
    Open,
}

/// What to do with a delivery whose event was handled before, with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMismatch {
    /// Count and log it, and answer as to any duplicate: the sender is acknowledged.
    #[default]
    Report,
    /// Count and log it, and answer 422. In a batch, after its new events have run.
    Refuse,
}

/// Which part of a handler's response is kept with its event, and replayed to duplicates.
///
/// The status always is. By default so are the header `content-type` and a body of up to 64 KiB.
///
/// # Example
///
/// ```
/// use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE, SET_COOKIE};
/// use tower_dedup::Replay;
///
/// let replay = Replay::new().headers([CONTENT_TYPE, CONTENT_LANGUAGE])?.body_limit(4 * 1024);
/// // A cookie is for one client.
/// assert!(Replay::new().headers([SET_COOKIE]).is_err());
/// # let _ = replay;
/// # Ok::<(), tower_dedup::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    headers: Arc<[HeaderName]>,
    body_limit: usize,
}

/// Headers that are for one client, or for one connection (RFC 9110, section 7.6.1): a copy of
/// them would be wrong.
const NEVER_KEPT: &[HeaderName] = &[
    header::SET_COOKIE,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::DATE,
];

impl Replay {
    /// Keeps the status, the header `content-type` and a body of up to 64 KiB.
    #[must_use]
    pub fn new() -> Self {
        Self { headers: [header::CONTENT_TYPE].into(), body_limit: 64 * 1024 }
    }

    /// Keeps these headers, instead of `content-type` alone.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidReplayHeader`] for `set-cookie` and for headers that belong to one
    /// connection or one moment: `connection`, `content-length`, `date`, `transfer-encoding` and
    /// their like.
    pub fn headers(
        mut self,
        headers: impl IntoIterator<Item = HeaderName>,
    ) -> Result<Self, ConfigError> {
        self.headers = headers.into_iter().collect();
        if self.headers.iter().any(|name| NEVER_KEPT.contains(name)) {
            return Err(ConfigError::InvalidReplayHeader);
        }
        Ok(self)
    }

    /// The longest body that is kept, in bytes. The response of a longer one is not kept at all:
    /// duplicates get an empty one, and a log event and a metric say so.
    #[must_use]
    pub const fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    pub(super) const fn limit(&self) -> usize {
        self.body_limit
    }

    /// Those of `headers` that are kept, or why the response cannot be.
    pub(super) fn select(&self, headers: &HeaderMap) -> Result<HeaderMap, &'static str> {
        let chosen = |name| self.headers.contains(&name);
        if headers.contains_key(header::CONTENT_ENCODING) && !chosen(header::CONTENT_ENCODING) {
            // Its bytes say nothing without that header.
            return Err("its body is encoded");
        }
        let mut kept = HeaderMap::new();
        for name in &*self.headers {
            for value in headers.get_all(name) {
                // Stores keep text.
                if std::str::from_utf8(value.as_bytes()).is_err() {
                    return Err("one of its headers is not text");
                }
                kept.append(name, value.clone());
            }
        }
        Ok(kept)
    }
}

impl Default for Replay {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether logs name an event by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogIds {
    /// By the first 16 hex digits of the id's SHA-256
    /// ([`DedupKey::log_id`](crate::DedupKey::log_id)).
    #[default]
    Hash,
    /// By the id itself. Ids of some senders are personal data.
    Plain,
}

/// The mark of a request whose signature was verified: a verifying layer outside the deduplicating
/// one inserts it into the request's extensions, and
/// [`DedupLayer::require_verified`](crate::DedupLayer::require_verified) asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified;

/// Which responses mean that the event was handled.
#[derive(Clone)]
pub(super) struct Success(Arc<dyn Fn(StatusCode) -> bool + Send + Sync>);

impl Success {
    pub(super) fn new(is_success: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_success))
    }

    pub(super) fn is(&self, status: StatusCode) -> bool {
        (self.0)(status)
    }
}

impl Default for Success {
    fn default() -> Self {
        Self::new(|status| status.is_success())
    }
}

impl fmt::Debug for Success {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Success(..)")
    }
}
