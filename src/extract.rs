//! [`Delivery`] as an axum extractor and [`CommitError`] as a response, on `axum-core`.

use std::convert::Infallible;
use std::fmt;

use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
use axum_core::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};

use crate::delivery::{Delivery, RetryAfterOfLayer};
use crate::ledger::completion::CommitError;
use crate::observe;

/// Extracts the delivery that the handler runs.
///
/// Use `Option<Delivery>` if a request may reach the handler without deduplication. Such requests
/// are handshakes, methods that are not deduplicated, and missing keys that pass through.
///
/// # Example
///
/// ```
/// use axum::http::StatusCode;
/// use tower_dedup::Delivery;
///
/// async fn on_event(delivery: Delivery, body: axum::body::Bytes) -> StatusCode {
///     tracing::info!(attempt = delivery.attempt(), bytes = body.len());
///     StatusCode::OK
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(on_event));
/// ```
impl<S: Sync> FromRequestParts<S> for Delivery {
    type Rejection = DeliveryRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get::<Self>().cloned().ok_or(DeliveryRejection(()))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Delivery {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

/// The rejection of a [`Delivery`] argument: no [`DedupLayer`](crate::DedupLayer) covers the route,
/// or the layer did not deduplicate the request.
#[derive(Debug, Clone, Copy)]
pub struct DeliveryRejection(());

impl DeliveryRejection {
    /// Returns 500, because the route has no such layer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        StatusCode::INTERNAL_SERVER_ERROR
    }
}

impl fmt::Display for DeliveryRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this request was not deduplicated")
    }
}

impl std::error::Error for DeliveryRejection {}

/// The body is empty. The cause is logged, because clients never see internal errors.
impl IntoResponse for DeliveryRejection {
    fn into_response(self) -> Response {
        let fix = "put a DedupLayer around the route, or take Option<Delivery> if handshakes and other \
                   requests without a key reach this handler";
        observe::rejected("Delivery", &self, fix);
        self.status().into_response()
    }
}

/// 503 with `Retry-After` if the error is [transient](CommitError::is_transient), else 500. The body is empty, and the
/// cause is logged.
///
/// `Retry-After` is 30 s; inside a [`DedupLayer`](crate::DedupLayer) it is
/// [`retry_after_unavailable`](crate::DedupLayer::retry_after_unavailable).
impl IntoResponse for CommitError {
    fn into_response(self) -> Response {
        observe::commit_failed(&self);
        if !self.is_transient() {
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
        let mut response = StatusCode::SERVICE_UNAVAILABLE.into_response();
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("30"));
        response.extensions_mut().insert(RetryAfterOfLayer);
        response
    }
}
