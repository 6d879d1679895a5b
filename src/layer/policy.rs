//! Policies: the choices that the layer's user has.

use std::fmt;
use std::sync::Arc;

use http::response;

/// What to do with a delivery that carries no key.
///
/// To use the body as the key instead, make it a part of the key:
/// `part.or(`[`key::body_digest()`](crate::key::body_digest)`)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Answer 400 and claim nothing.
    #[default]
    Reject,
    /// Run the handler without protection from duplicates. The bounds of a delivery still apply.
    PassThrough,
}

/// What to do with a delivery when the store is unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnUnavailable {
    /// Answer 503 with `Retry-After`: the sender delivers again.
    #[default]
    FailClosed,
    /// Run the handler without protection from duplicates. The key is completed (on arrival:
    /// claimed) afterwards, if the store is available by then.
    ///
    /// This is for a store that has replied to no claim of the delivery. If it has replied to some,
    /// the events that it has claimed run, and the answer is 503.
    FailOpen,
}

/// What to do with a delivery whose event was handled before with another payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMismatch {
    /// Count and log the mismatch, and answer like any duplicate: the sender is acknowledged.
    #[default]
    Report,
    /// Count and log the mismatch, and answer 422. A multi-event delivery is answered so after its
    /// new events have run.
    Refuse,
}

/// Decides whether the event was handled: an extension that a handler or an inner layer puts into
/// the response. With the feature `axum` it is a part of a response:
/// `(StatusCode::GONE, Disposition::Complete)`.
///
/// It takes precedence over [`success_when`](crate::DedupLayer::success_when). It stays in the
/// response, so that an outer deduplicating layer decides the same. Under the
/// [on-arrival](crate::DedupLayer::on_arrival) ledger it changes nothing but the log record,
/// because the key is permanent before the handler runs. Under the
/// [transactional](crate::DedupLayer::transactional) ledger, `Complete` replaces no commit: a
/// success that has completed nothing in a transaction, and has not called
/// [`nothing_to_write`](crate::Delivery::nothing_to_write), is answered 500.
///
/// # Example
///
/// ```
/// use http::{Response, StatusCode};
/// use tower_dedup::Disposition;
///
/// // Answer 422, and never run this event again.
/// let mut response = Response::new("no such account");
/// *response.status_mut() = StatusCode::UNPROCESSABLE_ENTITY;
/// response.extensions_mut().insert(Disposition::Complete);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disposition {
    /// The event was handled: its key becomes permanent, whatever the status.
    Complete,
    /// The event was not handled: its key is released, whatever the status. **After a 2xx the
    /// sender does not deliver again.**
    Release,
}

/// Marks a request whose signature was verified.
///
/// A verifying layer outside the deduplicating one inserts it into the request's extensions;
/// [`DedupLayer::require_verified`](crate::DedupLayer::require_verified) refuses requests without
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified;

/// Decides whether a response means that the event was handled.
#[derive(Clone)]
pub(super) struct Success(pub(super) Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>);

impl Success {
    pub(super) fn is(&self, response: &response::Parts) -> bool {
        match response.extensions.get::<Disposition>() {
            Some(disposition) => *disposition == Disposition::Complete,
            None => (self.0)(response),
        }
    }
}

impl fmt::Debug for Success {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Success(..)")
    }
}
