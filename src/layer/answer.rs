//! The layer's own answers, in one place.
//!
//! | case | status | `Retry-After` | header value |
//! |---|---|---|---|
//! | duplicate of a completed delivery | 200 (configurable) | | `duplicate` |
//! | in flight elsewhere | 503 | 5 s (configurable) | `in-flight` |
//! | store unavailable, no permit left, shutting down | 503 | 30 s (configurable) | `unavailable` |
//! | key missing, malformed, or too many | 400 | | `invalid-key` |
//! | same id, other payload, where the layer refuses that | 422 | | `mismatch` |
//! | body too large | 413 | | `too-large` |
//! | body broken | 400 | | `broken-body` |
//! | body too slow | 408 | | `slow-body` |
//! | the handler ended, broke or kept its transaction | 500 | | `uncommitted` |
//! | the handler's response, which was to be kept, ended in an error | 500 | | `broken-response` |
//! | not verified under `require_verified` | 500 | | `unverified` |
//!
//! 503 and not 409 while in flight: several senders never retry a 4xx. 200 and not 409 for a
//! duplicate: senders retry anything that is not 2xx. A duplicate whose response was
//! [kept](crate::DedupLayer::replay) has that one's status, headers and body. Nothing internal is said; the cause is
//! logged.

use std::any::Any;
use std::sync::Arc;

use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};

use super::body::ResponseBody;
use super::config::Config;
use crate::adapter::StoredResponse;

/// Why the layer answered in the handler's place: an extension of every response of its own, so
/// that an outer layer can count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DedupResult {
    /// The event was handled before.
    Duplicate,
    /// The event is being handled elsewhere.
    InFlight,
    /// The store did not answer, or the layer is at one of its bounds.
    Unavailable,
    /// The key is missing or malformed, or there are too many.
    InvalidKey,
    /// The event was handled with another payload.
    Mismatch,
    /// The body is over the limit.
    TooLarge,
    /// The body could not be read to its end.
    BrokenBody,
    /// The body did not arrive in time.
    SlowBody,
    /// The handler succeeded, but what it did to its transaction cannot be committed.
    Uncommitted,
    /// The handler's response was to be kept, and its body ended in an error.
    BrokenResponse,
    /// The layer requires verified requests, and this one is not.
    Unverified,
}

impl DedupResult {
    /// The value of the result header.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicate",
            Self::InFlight => "in-flight",
            Self::Unavailable => "unavailable",
            Self::InvalidKey => "invalid-key",
            Self::Mismatch => "mismatch",
            Self::TooLarge => "too-large",
            Self::BrokenBody => "broken-body",
            Self::SlowBody => "slow-body",
            Self::Uncommitted => "uncommitted",
            Self::BrokenResponse => "broken-response",
            Self::Unverified => "unverified",
        }
    }

    /// The status of the answer; that of a duplicate can be configured.
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Self::Duplicate => StatusCode::OK,
            Self::InFlight | Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::InvalidKey | Self::BrokenBody => StatusCode::BAD_REQUEST,
            Self::Mismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::Uncommitted | Self::BrokenResponse | Self::Unverified => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }
}

/// How a delivery ended.
pub(super) enum Answer<B, E> {
    /// As the inner service says.
    Inner(Result<Response<ResponseBody<B>>, E>),
    /// As the layer says.
    Own(DedupResult),
    /// As the inner service said to the first delivery.
    Replay(Arc<StoredResponse>),
    /// The inner service panicked.
    Panicked(Box<dyn Any + Send>),
}

/// A response of the layer's own.
pub(super) fn own<B>(result: DedupResult, config: &Config) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::own());
    *response.status_mut() = status(result, config);
    let headers = response.headers_mut();
    let retry_after = match result {
        DedupResult::InFlight => Some(config.retry_after_in_flight),
        DedupResult::Unavailable => Some(config.retry_after_unavailable),
        _ => None,
    };
    if let Some(after) = retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(after.as_secs()));
    }
    mark(&mut response, result, config);
    response
}

/// The response to the first delivery of an event, said again.
pub(super) fn replayed<B>(stored: &StoredResponse, config: &Config) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::full(stored.body.clone()));
    *response.status_mut() = stored.status;
    *response.headers_mut() = stored.headers.clone();
    mark(&mut response, DedupResult::Duplicate, config);
    response
}

/// Says that the response is the layer's, and why.
fn mark<B>(response: &mut Response<B>, result: DedupResult, config: &Config) {
    if let Some(name) = &config.result_header {
        let value = HeaderValue::from_static(result.as_str());
        response.headers_mut().insert(HeaderName::clone(name), value);
    }
    response.extensions_mut().insert(result);
}

pub(super) fn status(result: DedupResult, config: &Config) -> StatusCode {
    match result {
        DedupResult::Duplicate => config.duplicate_status,
        other => other.status(),
    }
}

/// What a panic said, for a log.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&'static str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a value")
}
