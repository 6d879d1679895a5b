//! [`DedupResult`] and the layer's own responses.
//!
//! The table of all answers is in the [guide](crate::guide::delivery#answers). A response never
//! names an internal error: the log record does.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};

use super::body::ResponseBody;
use super::config::Config;
use crate::adapter::StoredResponse;

/// Why the layer answered in the handler's place: an extension of each of its own responses, so
/// that an outer layer can count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DedupResult {
    /// The event was handled before.
    Duplicate,
    /// The event is in flight.
    InFlight,
    /// The store failed, or the layer is at one of its bounds.
    Unavailable,
    /// The key is missing or malformed, or there are too many keys.
    InvalidKey,
    /// The event was handled with another payload.
    Mismatch,
    /// The body is over the limit.
    TooLarge,
    /// The body ended in an error.
    BrokenBody,
    /// The body did not arrive in time.
    SlowBody,
    /// The handler ran for longer than its timeout and was dropped.
    HandlerTimeout,
    /// The handler succeeded, but its transaction cannot be committed.
    Uncommitted,
    /// The handler's response was to be stored, and its body ended in an error.
    BrokenResponse,
    /// The layer requires verified requests, and this request is not verified.
    Unverified,
}

impl DedupResult {
    /// Returns the value of the result header.
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
            Self::HandlerTimeout => "handler-timeout",
            Self::Uncommitted => "uncommitted",
            Self::BrokenResponse => "broken-response",
            Self::Unverified => "unverified",
        }
    }

    /// Returns the status of the answer.
    pub(super) const fn status(self, config: &Config) -> StatusCode {
        match self {
            Self::Duplicate => config.duplicate_status,
            Self::InFlight => config.in_flight_status,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::InvalidKey | Self::BrokenBody => StatusCode::BAD_REQUEST,
            Self::Mismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::HandlerTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Uncommitted | Self::BrokenResponse | Self::Unverified => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }
}

/// How a delivery ended.
pub(super) enum Ending<B, E> {
    /// The inner service returned a response or an error.
    Inner(Result<Response<ResponseBody<B>>, E>),
    /// The layer answers.
    Own(DedupResult),
    /// The layer answers with the stored response to the first delivery.
    Replay(Arc<StoredResponse>),
    /// The inner service panicked.
    Panicked(Box<dyn Any + Send>),
}

impl<B, E> Ending<B, E> {
    /// Returns the status of a response that is not the inner service's.
    pub(super) fn own_status(&self, config: &Config) -> Option<StatusCode> {
        match self {
            Self::Own(result) => Some(result.status(config)),
            Self::Replay(response) => Some(response.status),
            Self::Inner(_) | Self::Panicked(_) => None,
        }
    }
}

/// Returns a response of the layer's own.
pub(super) fn own<B>(result: DedupResult, config: &Config) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::own());
    *response.status_mut() = result.status(config);
    let retry_after = match result {
        DedupResult::InFlight => Some(config.retry_after_in_flight),
        DedupResult::Unavailable => Some(config.retry_after_unavailable),
        _ => None,
    };
    if let Some(after) = retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds(after)));
    }
    mark(&mut response, result, config);
    response
}

/// Returns whole seconds, rounded up: the sender must not come back too early.
fn seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// Returns the stored response to the first delivery of an event.
pub(super) fn replayed<B>(stored: &StoredResponse, config: &Config) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::full(stored.body.clone()));
    *response.status_mut() = stored.status;
    *response.headers_mut() = stored.headers.clone();
    mark(&mut response, DedupResult::Duplicate, config);
    response
}

/// Marks a response as the layer's own.
fn mark<B>(response: &mut Response<B>, result: DedupResult, config: &Config) {
    if let Some(name) = &config.result_header {
        let value = HeaderValue::from_static(result.as_str());
        response.headers_mut().insert(HeaderName::clone(name), value);
    }
    response.extensions_mut().insert(result);
}

/// Returns the text of a panic, for a log record.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&'static str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a value")
}
