//! Policies: the choices that the layer's user has.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, header, response};

/// What to do with a delivery that carries no key.
///
/// To use the body as the key then, say so in the key: `part.or(`[`key::body_digest()`](crate::key::body_digest)`)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// Answer 400 and claim nothing.
    #[default]
    Reject,
    /// Run the handler without protection from duplicates. The bounds of a delivery hold.
    PassThrough,
}

/// What to do with a delivery whose event is in flight.
///
/// It is never acknowledged before it is handled: a sender that must get its 200 at once needs
/// [`DedupLayer::on_arrival`](crate::DedupLayer::on_arrival), which may lose the event, or a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnInFlight {
    /// Wait for the first run to end, up to this long, and begin again. If the first run succeeded,
    /// answer 200; if it failed, run the handler. Past the bound, 503 with `Retry-After`. So is, at once, a
    /// delivery beyond eight that wait for one key. One of those that wait for an event claims it again for all,
    /// and takes a permit to run for each claim. The others hold none, and follow one after the other.
    ///
    /// The default, with 2 s: most handlers end within 2 s, so the sender never sees a failure.
    Wait(Duration),
    /// Answer 503 with `Retry-After` at once.
    Reject,
}

impl Default for OnInFlight {
    fn default() -> Self {
        Self::Wait(Duration::from_secs(2))
    }
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
    /// This is for a store that has replied to no claim of the delivery. If it has replied to some, the
    /// events that it has claimed run, and the answer is 503.
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

/// Decides whether the event was handled: an extension that a handler or an inner layer puts into the
/// response. With the feature `axum` it is a part of a response: `(StatusCode::GONE, Disposition::Complete)`.
///
/// It decides before [`success_when`](crate::DedupLayer::success_when). It stays in the response, so
/// that an outer deduplicating layer decides the same. Under the
/// [on-arrival](crate::DedupLayer::on_arrival) ledger it changes nothing but the log record, because
/// the key is permanent before the handler runs. Under the
/// [transactional](crate::DedupLayer::transactional) ledger, `Complete` replaces no commit: a success that has completed
/// nothing in a transaction, and has not said [`nothing_to_write`](crate::Delivery::nothing_to_write), is 500.
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
    /// The event was not handled: its key is released, whatever the status. **After a 2xx the sender
    /// does not deliver again.**
    Release,
}

/// Which part of a handler's response is stored with its event and replayed to duplicates.
///
/// The status always is. By default so are the header `content-type` and a body of up to 64 KiB.
///
/// # Example
///
/// ```
/// use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE};
/// use tower_dedup::Replay;
///
/// let replay = Replay::new().headers([CONTENT_TYPE, CONTENT_LANGUAGE]).body_limit(4 * 1024);
/// # let _ = replay;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    headers: Arc<[HeaderName]>,
    /// Whether the headers that begin with `content-` are stored, too.
    describes_content: bool,
    pub(super) body_limit: usize,
}

/// Headers that are for one client, or for one connection (RFC 9110, section 7.6.1): a copy of
/// them would be wrong. The coding of a body is chosen for one client (section 12.5.3).
const NEVER_STORED: &[HeaderName] = &[
    header::SET_COOKIE,
    header::CONTENT_ENCODING,
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
    /// Stores the status, the header `content-type` and a body of up to 64 KiB.
    #[must_use]
    pub fn new() -> Self {
        Self {
            headers: [header::CONTENT_TYPE].into(),
            describes_content: false,
            body_limit: 64 * 1024,
        }
    }

    /// Stores these headers instead of `content-type`.
    ///
    /// `set-cookie` is invalid, and so are headers that belong to one client, one connection or one moment:
    /// `content-encoding`, `connection`, `content-length`, `date`, `transfer-encoding` and similar ones. A response
    /// with a `content-encoding` is not stored.
    #[must_use]
    pub fn headers(mut self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        self.headers = headers.into_iter().collect();
        self
    }

    /// Stores every header that begins with `content-`, too, but for `content-length` and `content-encoding`.
    pub(crate) const fn describing_content(mut self) -> Self {
        self.describes_content = true;
        self
    }

    /// Sets the longest body that is stored, in bytes. A response with a longer body is not stored
    /// at all, which is logged and counted. Its duplicates get an empty response.
    #[must_use]
    pub const fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// Returns the headers that no response may be stored with.
    pub(super) fn invalid(&self) -> Vec<&HeaderName> {
        self.headers.iter().filter(|name| NEVER_STORED.contains(name)).collect()
    }

    fn stores(&self, name: &HeaderName) -> bool {
        let is_described = || name.as_str().starts_with("content-") && !NEVER_STORED.contains(name);
        self.headers.contains(name) || (self.describes_content && is_described())
    }

    /// Returns those of `headers` that are stored, or why the response cannot be stored.
    pub(super) fn select(&self, headers: &HeaderMap) -> Result<HeaderMap, &'static str> {
        if headers.contains_key(header::CONTENT_ENCODING) {
            // The client of a duplicate may not take that coding.
            return Err("its body is encoded");
        }
        let mut selected = HeaderMap::new();
        for (name, value) in headers.iter().filter(|(name, _)| self.stores(name)) {
            // Stores take text.
            if std::str::from_utf8(value.as_bytes()).is_err() {
                return Err("one of its headers is not text");
            }
            selected.append(name, value.clone());
        }
        Ok(selected)
    }
}

/// Returns `true` for a response whose body is a stream: it may not end, and its client reads it as it comes.
/// `x-accel-buffering: no` is what nginx and others take as the sign not to buffer a response.
pub(super) fn is_stream(headers: &HeaderMap) -> bool {
    let value = |name: &str| headers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
    let kind = value("content-type").split(|byte| *byte == b';').next().unwrap_or_default();
    let kinds = [&b"text/event-stream"[..], b"multipart/x-mixed-replace"];
    kinds.iter().any(|stream| kind.trim_ascii().eq_ignore_ascii_case(stream))
        || value("x-accel-buffering").trim_ascii().eq_ignore_ascii_case(b"no")
}

impl Default for Replay {
    fn default() -> Self {
        Self::new()
    }
}

/// How log records name an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogIds {
    /// Log the id itself, with control characters escaped. Ids of some senders are personal data.
    #[default]
    Plain,
    /// Log the first 16 hex digits of the id's SHA-256
    /// ([`DedupKey::log_id`](crate::DedupKey::log_id)).
    Hashed,
}

/// Marks a request whose signature was verified.
///
/// A verifying layer outside the deduplicating one inserts it into the request's extensions;
/// [`DedupLayer::require_verified`](crate::DedupLayer::require_verified) refuses requests without it.
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
