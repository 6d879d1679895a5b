//! [`Answer`]: how a delivery ended, and the response that this makes.

use std::any::Any;
use std::sync::Arc;

use http::header::{HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};

use crate::adapter::StoredResponse;
use crate::body::ResponseBody;
use crate::layer::Config;
use crate::response::DedupResult;

/// How a delivery ended.
pub(crate) enum Answer<B, E> {
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
    mark(&mut response, result, config);
    response
}

/// The response to the first delivery of an event, said again.
pub(crate) fn replayed<B>(stored: &StoredResponse, config: &Config) -> Response<ResponseBody<B>> {
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
