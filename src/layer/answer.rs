//! [`DedupResult`] and the layer's own responses.
//!
//! The table of all answers is in the [guide](crate::guide::how_it_works#answers). A response never
//! names an internal error: the log record does.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};

use super::body::ResponseBody;
use super::config::Config;
use crate::adapter::contract::StoredResponse;

/// Stripe's name for the header of a replayed response. The draft has none.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Why the layer answered in the handler's place: an extension of each of its own responses, so
/// that an outer layer can count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DedupResult {
    /// The event was handled before.
    Duplicate,
    /// The request is a [handshake](crate::KeyExtractor::handshake_when), which carries no event.
    Handshake,
    /// The event is in flight.
    InFlight,
    /// The store failed, or no permit was free.
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
    /// The handler succeeded, and no transaction has completed its event.
    Uncommitted,
    /// The handler's response was to be stored, and its body ended in an error.
    BrokenResponse,
    /// The request with this `Idempotency-Key` was handled before, and its response was not stored.
    ResponseNotStored,
    /// The layer requires verified requests, and this request is not verified.
    Unverified,
    /// The request has an `Idempotency-Key`, and no [scope](crate::DedupLayer::idempotency_key).
    Unscoped,
}

impl DedupResult {
    /// Returns the value of the result header.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicate",
            Self::Handshake => "handshake",
            Self::InFlight => "in-flight",
            Self::Unavailable => "unavailable",
            Self::InvalidKey => "invalid-key",
            Self::Mismatch => "mismatch",
            Self::TooLarge => "too-large",
            Self::BrokenBody => "broken-body",
            Self::SlowBody => "slow-body",
            Self::HandlerTimeout => "handler-timeout",
            Self::Uncommitted => "uncommitted",
            Self::BrokenResponse | Self::ResponseNotStored => "broken-response",
            Self::Unverified => "unverified",
            Self::Unscoped => "unscoped",
        }
    }

    /// Returns the fragment of a problem's `type`.
    const fn fragment(self) -> &'static str {
        match self {
            Self::ResponseNotStored => "response-not-stored",
            _ => self.as_str(),
        }
    }

    /// Returns the status of the answer.
    pub(super) const fn status(self, config: &Config) -> StatusCode {
        match self {
            Self::Duplicate => config.duplicate_status,
            Self::Handshake => StatusCode::OK,
            Self::InFlight => config.in_flight_status,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::InvalidKey | Self::BrokenBody => StatusCode::BAD_REQUEST,
            // Client libraries repeat a request after a 5xx.
            Self::Mismatch | Self::ResponseNotStored => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::HandlerTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Uncommitted | Self::BrokenResponse | Self::Unverified | Self::Unscoped => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }

    /// Returns the title and the detail of a problem for the clients of an API. They name nothing
    /// internal.
    const fn problem(self) -> (&'static str, &'static str) {
        const SAME: &str = "Repeat the request later with the same Idempotency-Key.";
        const FAILED: &str = "The server could not process the request";
        const BODY: &str = "The body of the request could not be read";
        match self {
            Self::Duplicate | Self::ResponseNotStored => (
                "The response is no longer available",
                "A request with this Idempotency-Key was processed. Its response was not stored. A new \
                 key would process the request again.",
            ),
            Self::Handshake => ("A handshake", "The request carries no event."),
            Self::InFlight => ("A request with this Idempotency-Key is in progress", SAME),
            Self::Unavailable => ("The service is temporarily unavailable", SAME),
            Self::InvalidKey => (
                "The Idempotency-Key is missing or malformed",
                "Send one Idempotency-Key: a string of 1 to 255 printable ASCII characters in \
                 double quotes, such as a UUID.",
            ),
            Self::Mismatch => (
                "This Idempotency-Key was used for another request",
                "The first request with this Idempotency-Key had another query string or body. Use \
                 a new key for a new request.",
            ),
            Self::TooLarge => (BODY, "The body is too large."),
            Self::BrokenBody => (BODY, "The body is not complete."),
            Self::SlowBody => (BODY, "The body did not arrive in time."),
            Self::HandlerTimeout => ("The request took too long", SAME),
            Self::Uncommitted | Self::BrokenResponse => (FAILED, SAME),
            Self::Unverified | Self::Unscoped => (FAILED, "The request was not processed."),
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
    // By choice, a duplicate is answered 2xx, which is no problem.
    let mut response = if config.problems && !result.status(config).is_success() {
        problem(result, config)
    } else {
        Response::new(ResponseBody::own())
    };
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

/// Returns problem details (RFC 9457) about an answer.
fn problem<B>(result: DedupResult, config: &Config) -> Response<ResponseBody<B>> {
    let status = result.status(config);
    let (title, detail) = result.problem();
    let (kind, title) = match &config.problem_docs {
        Some(docs) => (format!("{docs}#{}", result.fragment()), title),
        // Section 4.2.1: the title of this type is the status's.
        None => ("about:blank".to_owned(), status.canonical_reason().unwrap_or(title)),
    };
    let problem = serde_json::json!({
        "type": kind,
        "title": title,
        "status": status.as_u16(),
        "detail": detail,
    });
    let mut response = Response::new(ResponseBody::full(problem.to_string().into()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("en"));
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
    if config.problems {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_panic_is_read_and_another_payload_is_named() {
        assert_eq!(panic_message(&"text"), "text");
        assert_eq!(panic_message(&"a string".to_owned()), "a string");
        assert_eq!(panic_message(&7), "a value");
    }
}
