//! Policies: what the layer does where there is a choice.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

/// What to do with a delivery that carries no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Answer 400. Nothing is recorded.
    #[default]
    Reject,
    /// Run the handler, unprotected from duplicates.
    PassThrough,
    /// Know the delivery by the SHA-256 of its raw body.
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

/// Whether logs name an event by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogIds {
    /// By the first 16 hex digits of the id's SHA-256
    /// ([`DedupKey::fingerprint`](crate::DedupKey::fingerprint)).
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
pub(crate) struct Success(Arc<dyn Fn(StatusCode) -> bool + Send + Sync>);

impl Success {
    pub(crate) fn new(is_success: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_success))
    }

    pub(crate) fn is(&self, status: StatusCode) -> bool {
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
