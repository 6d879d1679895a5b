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
    type Rejection = MissingDelivery;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get::<Self>().cloned().ok_or(MissingDelivery(()))
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
pub struct MissingDelivery(());

impl MissingDelivery {
    /// Returns 500, because the route has no such layer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        StatusCode::INTERNAL_SERVER_ERROR
    }
}

impl fmt::Display for MissingDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this request was not deduplicated")
    }
}

impl std::error::Error for MissingDelivery {}

/// The body is empty. The cause is logged, because clients never see internal errors.
impl IntoResponse for MissingDelivery {
    fn into_response(self) -> Response {
        observe::rejected("Delivery", &self);
        self.status().into_response()
    }
}

/// Extracts the delivery's transaction, which the layer lends until the argument is dropped.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "sqlite")] {
/// use axum::http::StatusCode;
/// use sqlx::Sqlite;
/// use tower_dedup::{DedupTx, Delivery};
///
/// async fn on_event(delivery: Delivery, mut tx: DedupTx<Sqlite>) -> Result<(), StatusCode> {
///     sqlx::query("UPDATE orders SET paid = 1 WHERE id = ?")
///         .bind(delivery.id().to_owned())
///         .execute(&mut *tx)
///         .await
///         .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
///     Ok(())
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(on_event));
/// # }
/// ```
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: sqlx::Database, S: Sync> FromRequestParts<S> for DedupTx<DB> {
    type Rejection = TxRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, TxRejection> {
        let handle =
            parts.extensions.get::<TxHandle<DB>>().ok_or(TxRejection(TxUnavailable::Absent))?;
        handle.lend().map_err(TxRejection)
    }
}

/// Returns `None` if the layer did not deduplicate the request, as for a handshake.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<DB: sqlx::Database, S: Sync> OptionalFromRequestParts<S> for DedupTx<DB> {
    type Rejection = TxRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, TxRejection> {
        let Some(handle) = parts.extensions.get::<TxHandle<DB>>() else { return Ok(None) };
        handle.lend().map(Some).map_err(TxRejection)
    }
}

/// The rejection of a [`DedupTx`] argument: no
/// [transactional](crate::DedupLayer::transactional) layer over this database covers the route, or
/// the transaction is already lent.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[derive(Debug, Clone, Copy)]
pub struct TxRejection(TxUnavailable);

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl TxRejection {
    /// Returns 500, because the route has no such layer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        StatusCode::INTERNAL_SERVER_ERROR
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl fmt::Display for TxRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the transaction is unavailable")
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl std::error::Error for TxRejection {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The body is empty. The cause is logged, because clients never see internal errors.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl IntoResponse for TxRejection {
    fn into_response(self) -> Response {
        observe::rejected("DedupTx", &self);
        self.status().into_response()
    }
}
