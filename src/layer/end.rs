//! [`DeliveryEnd`]: what the ledger knows of a delivery's events once it has been answered.
//! [`ReportEnd`] asks for it.

use http::Response;

/// What the ledger knows of a delivery's events, in the extensions of the response. A layer outside
/// may conclude from it whether the delivery has to come again; a status does not say so, because a
/// handler may answer anything.
///
/// The layer's own answers have it. A handler's response has it only if the request asks with the
/// extension [`ReportEnd`], because it costs three allocations there.
///
/// A request without a key has none, and neither has one that is refused before its events are
/// known: 400, 408, 413, `unverified`, `unscoped`. An error or a panic of the inner service has no
/// response: its events are released. Of two nested layers, the response has the end of the outer
/// one.
///
/// ```
/// use http::Response;
/// use tower_dedup::DeliveryEnd;
///
/// fn is_done<B>(response: &Response<B>) -> bool {
///     response.extensions().get() == Some(&DeliveryEnd::Complete)
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeliveryEnd {
    /// Every event of the request is complete: the handler has succeeded, or the delivery is a
    /// duplicate. On arrival, a failed handler's event is complete too.
    Complete,
    /// Every event is complete, and one was handled with another payload, which the layer
    /// [refuses](crate::OnMismatch::Refuse).
    Mismatch,
    /// The handler ran without success, and none of the events that it ran is complete. It is also
    /// the end after which the completion may have failed for good: `uncommitted`.
    Released,
    /// Another delivery runs an event of the request or may run it, or the state of an event is not
    /// known. The answers are `in-flight`, `unavailable`, and those of a bound that is reached.
    InFlight,
    /// The layer has decided nothing: its mode is not [`Enforce`](crate::Mode::Enforce), or the
    /// handler ran [unprotected](crate::Delivery::is_unprotected).
    Undecided,
}

/// The extension of a request that asks for the [`DeliveryEnd`] of a handler's response.
///
/// ```
/// use http::Request;
/// use tower_dedup::ReportEnd;
///
/// fn ask<B>(request: &mut Request<B>) {
///     request.extensions_mut().insert(ReportEnd);
/// }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ReportEnd;

/// Sets what a response reports. `None` removes what an inner layer has reported.
pub(super) fn set<B>(response: &mut Response<B>, end: Option<DeliveryEnd>) {
    match end {
        Some(end) => drop(response.extensions_mut().insert(end)),
        None => drop(response.extensions_mut().remove::<DeliveryEnd>()),
    }
}
