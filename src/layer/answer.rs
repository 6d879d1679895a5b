//! The layer's own responses.
//!
//! A response never names an internal error: the log record does.

use std::any::Any;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response};

use super::body::ResponseBody;
use super::config::{Config, WithoutResponse};
use super::end::{self, DeliveryEnd};
use crate::adapter::contract::{Seen, StoredResponse};
use crate::observe::{DedupAnswer, Outcome};

/// How a request ends for its caller: in a response, or in an error or a panic of the inner
/// service.
pub(super) type Ending<B, E> = thread::Result<Result<Response<ResponseBody<B>>, E>>;

/// How a delivery ends, for its log record and for its caller.
pub(super) struct Ended<B, E> {
    pub(super) outcome: Outcome,
    pub(super) ending: Ending<B, E>,
}

/// Returns the ending of a delivery that the layer answers.
pub(super) fn ended<B, E>(outcome: Outcome, config: &Config) -> Ended<B, E> {
    Ended { outcome, ending: own(outcome.answer(), config) }
}

/// Returns an answer of the layer's own.
pub(super) fn own<B, E>(answer: DedupAnswer, config: &Config) -> Ending<B, E> {
    let (status, retry_after) = match (answer, config.without_response) {
        (DedupAnswer::InFlight, _) => (config.in_flight_status, Some(config.retry_after_in_flight)),
        (DedupAnswer::Unavailable, _) => (answer.status(), Some(config.retry_after_unavailable)),
        (DedupAnswer::Duplicate, WithoutResponse::Empty(status)) => (status, None),
        _ => (answer.status(), None),
    };
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = status;
    if let Some(after) = retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds(after)));
    }
    dressed(response, Some(answer), config)
}

/// Returns the answer to a delivery of which every event is complete.
pub(super) fn known<B, E>(seen: &Seen, config: &Config) -> Ending<B, E> {
    let stored = seen.stored.as_ref().and_then(|stored| stored.response.as_deref());
    match (stored, config.without_response) {
        (Some(response), _) => replayed(response, config),
        (None, WithoutResponse::Empty(_)) => own(DedupAnswer::Duplicate, config),
        (None, WithoutResponse::Refuse) => own(DedupAnswer::ResponseNotStored, config),
    }
}

/// Returns the stored response to the first delivery of an event.
fn replayed<B, E>(stored: &StoredResponse, config: &Config) -> Ending<B, E> {
    let mut response = Response::new(stored.body.clone());
    *response.status_mut() = stored.status;
    *response.headers_mut() = stored.headers.clone();
    dressed(response, None, config)
}

/// Marks a response as the layer's own.
fn dressed<B, E>(
    mut response: Response<Bytes>,
    answer: Option<DedupAnswer>,
    config: &Config,
) -> Ending<B, E> {
    if let Some(dress) = config.dress {
        dress(&mut response, answer, config.problem_docs.as_deref());
    }
    let answer = answer.unwrap_or(DedupAnswer::Duplicate);
    if let Some(name) = &config.result_header {
        let value = HeaderValue::from_static(answer.as_str());
        response.headers_mut().insert(HeaderName::clone(name), value);
    }
    response.extensions_mut().insert(answer);
    end::set(&mut response, end_of(answer));
    Ok(Ok(response.map(ResponseBody::full)))
}

/// Returns what an answer of the layer's own says of the delivery's events.
fn end_of(answer: DedupAnswer) -> Option<DeliveryEnd> {
    match answer {
        DedupAnswer::Duplicate | DedupAnswer::ResponseNotStored => Some(DeliveryEnd::Complete),
        DedupAnswer::Mismatch => Some(DeliveryEnd::Mismatch),
        DedupAnswer::InFlight | DedupAnswer::Unavailable => Some(DeliveryEnd::InFlight),
        DedupAnswer::HandlerTimeout | DedupAnswer::Uncommitted | DedupAnswer::BrokenResponse => {
            Some(DeliveryEnd::Released)
        }
        DedupAnswer::InvalidKey
        | DedupAnswer::TooLarge
        | DedupAnswer::BrokenBody
        | DedupAnswer::SlowBody
        | DedupAnswer::Unverified
        | DedupAnswer::Unscoped
        | DedupAnswer::Handshake => None,
    }
}

/// Returns whole seconds, rounded up: the sender must not come back too early.
pub(super) fn seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
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
