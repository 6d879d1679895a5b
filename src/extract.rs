//! [`Delivery`] as an axum extractor, [`CommitError`] and [`Disposition`] as responses, on
//! `axum-core`.

use std::convert::Infallible;
use std::fmt;

use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
use axum_core::response::{IntoResponse, IntoResponseParts, Response, ResponseParts};
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};

use crate::delivery::{Delivery, RetryAfterOfLayer};
use crate::layer::Disposition;
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

impl fmt::Display for DeliveryRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this request was not deduplicated")
    }
}

impl std::error::Error for DeliveryRejection {}

/// 500, because the route has no such layer. The body is empty, and the cause is logged.
impl IntoResponse for DeliveryRejection {
    fn into_response(self) -> Response {
        let fix = "put a DedupLayer around the route, or take Option<Delivery> if handshakes and other \
                   requests without a key reach this handler";
        observe::records::rejected("Delivery", &self, fix);
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}

/// 503 with `Retry-After` if the error is [transient](CommitError::is_transient), else 500. The
/// body is empty, and the cause is logged.
///
/// `Retry-After` is 30 s; inside a [`DedupLayer`](crate::DedupLayer) it is
/// [`retry_after_unavailable`](crate::DedupLayer::retry_after_unavailable).
impl IntoResponse for CommitError {
    fn into_response(self) -> Response {
        observe::records::commit_failed(&self);
        if !self.is_transient() {
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
        let mut response = StatusCode::SERVICE_UNAVAILABLE.into_response();
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("30"));
        response.extensions_mut().insert(RetryAfterOfLayer);
        response
    }
}

/// A part of a response, beside a status and a body.
///
/// ```
/// use axum::http::StatusCode;
/// use axum::response::{IntoResponse, Response};
/// use tower_dedup::Disposition;
///
/// /// Never runs this event again, and tells the sender why.
/// fn park(error: String) -> Response {
///     (StatusCode::UNPROCESSABLE_ENTITY, Disposition::Complete, error).into_response()
/// }
/// let parked = park("no such account".to_owned());
/// assert_eq!(parked.status(), 422);
/// assert_eq!(parked.extensions().get(), Some(&Disposition::Complete));
/// ```
impl IntoResponseParts for Disposition {
    type Error = Infallible;

    fn into_response_parts(self, mut parts: ResponseParts) -> Result<ResponseParts, Infallible> {
        parts.extensions_mut().insert(self);
        Ok(parts)
    }
}

/// An empty response: 200 for [`Complete`](Disposition::Complete), 503 for
/// [`Release`](Disposition::Release), because after a 2xx the sender does not deliver again. A
/// status before it in a tuple replaces its own.
///
/// ```
/// use axum::http::StatusCode;
/// use axum::response::IntoResponse;
/// use tower_dedup::Disposition;
///
/// assert_eq!(Disposition::Complete.into_response().status(), 200);
/// assert_eq!(Disposition::Release.into_response().status(), 503);
/// let gone = (StatusCode::GONE, Disposition::Complete).into_response();
/// assert_eq!(gone.status(), 410);
/// assert_eq!(gone.extensions().get(), Some(&Disposition::Complete));
/// ```
impl IntoResponse for Disposition {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Complete => StatusCode::OK,
            Self::Release => StatusCode::SERVICE_UNAVAILABLE,
        };
        let mut response = status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
