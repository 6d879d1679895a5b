//! [`Answer`]: how a delivery ended, and the response that this makes.

use std::any::Any;

use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};

use crate::body::ResponseBody;
use crate::layer::Config;
use crate::response::DedupResult;

/// How a delivery ended.
pub(crate) enum Answer<T, E> {
    /// As the inner service says.
    Inner(Result<T, E>),
    /// As the layer says.
    Own(DedupResult),
    /// The inner service panicked.
    Panicked(Box<dyn Any + Send>),
}

/// A response of the layer's own.
pub(crate) fn own<B>(result: DedupResult, config: &Config) -> Response<ResponseBody<B>> {
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
    if let Some(name) = &config.result_header {
        headers.insert(HeaderName::clone(name), HeaderValue::from_static(result.as_str()));
    }
    response.extensions_mut().insert(result);
    response
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
