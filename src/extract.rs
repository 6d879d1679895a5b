//! [`Delivery`] and `DedupTx` as axum extractors, on `axum-core`.

use std::convert::Infallible;
use std::fmt;

use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
use axum_core::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::delivery::Delivery;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::ledger::transaction::{DedupTx, TxHandle, TxUnavailable};
use crate::observe;

/// Extracts the delivery that the handler runs.
///
/// Use `Option<Delivery>` if a request may reach the handler without deduplication. Such requests
/// are handshakes, methods that are not deduplicated, and missing keys that pass through. Under a
/// transactional layer, the arguments `Option<Delivery>` and [`DedupTx`](crate::DedupTx) serve
/// deliveries and handshakes.
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

/// Extracts the transaction of a delivery, which the layer lends until the argument is dropped.
///
/// A handshake, and a missing key that passes through, get a transaction without a key. It opens here,
/// and the layer commits it after a success. So a handler of deliveries and handshakes takes `DedupTx`
/// and `Option<Delivery>`.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: sqlx::Database, S: Sync> FromRequestParts<S> for DedupTx<DB> {
    type Rejection = DedupTxRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, DedupTxRejection> {
        let handle = parts
            .extensions
            .get::<TxHandle<DB>>()
            .ok_or(DedupTxRejection(TxUnavailable::Absent))?;
        handle.lend().await.map_err(DedupTxRejection)
    }
}

/// Returns `None` if no transactional layer over this database covers the route, or if the request's
/// method is not deduplicated.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: sqlx::Database, S: Sync> OptionalFromRequestParts<S> for DedupTx<DB> {
    type Rejection = DedupTxRejection;

    async fn from_request_parts(
        parts: &mut Parts,
        _: &S,
    ) -> Result<Option<Self>, DedupTxRejection> {
        let Some(handle) = parts.extensions.get::<TxHandle<DB>>() else { return Ok(None) };
        handle.lend().await.map(Some).map_err(DedupTxRejection)
    }
}

/// The rejection of a [`DedupTx`] argument: no
/// [transactional](crate::DedupLayer::transactional) layer over this database covers the route, the
/// transaction is already lent, or the store opened none.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[derive(Debug, Clone)]
pub struct DedupTxRejection(TxUnavailable);

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl DedupTxRejection {
    /// Returns 503 if the store opened no transaction, and otherwise 500, because of a mistake in the
    /// program.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.0 {
            TxUnavailable::Unopened(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn fix(&self) -> &'static str {
        match self.0 {
            TxUnavailable::Absent => {
                "put DedupLayer::transactional over this database around the route, or take \
                 Option<DedupTx> if methods that are not deduplicated reach this handler"
            }
            TxUnavailable::Lent => "take one DedupTx at a time: drop it before the next one",
            TxUnavailable::Copied => {
                "put a layer that runs the handler again outside the DedupLayer"
            }
            TxUnavailable::Closed => "take the DedupTx before the handler returns",
            TxUnavailable::Unopened(_) => {
                "check the database, and that its pool has more connections than max_running"
            }
        }
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl fmt::Display for DedupTxRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the transaction is unavailable")
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl std::error::Error for DedupTxRejection {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The body is empty. The cause is logged, because clients never see internal errors.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl IntoResponse for DedupTxRejection {
    fn into_response(self) -> Response {
        observe::rejected("DedupTx", &self, self.fix());
        self.status().into_response()
    }
}
