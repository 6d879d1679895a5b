//! A request without a key under a transactional ledger: a handshake, or a missing key that passes
//! through.
//!
//! Its handler may borrow a transaction, as the handler of a delivery does. So the request has a permit
//! and a task of its own, as a delivery has. No caller can drop the handler between its writes and their
//! COMMIT. A handler that borrows nothing costs the store nothing.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::answer::Ending;
use super::config::{Config, ServiceState};
use super::delivery::{call, judge, uncommitted};
use super::gate::Permit;
use super::report::ReportFields;
use crate::error::ErrorKind;
use crate::ledger::KeylessClaim;
use crate::observe::Outcome;

/// Runs the handler, commits its transaction after a success, and reports the request.
pub(super) async fn run_without_key<S, L, B, ResBody>(
    inner: S,
    request: Request<B>,
    service: Arc<ServiceState<L>>,
    permit: Permit,
    mut report: ReportFields,
    claim: Box<dyn KeylessClaim>,
) -> Ending<ResBody, S::Error>
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes>,
{
    let config = &service.config;
    let running = config.meters.running();
    // A panic of an adapter or of `success_when` counts as a panic of the handler. The dropped claim is
    // rolled back.
    let served = AssertUnwindSafe(serve(inner, request, config, &mut report, claim)).catch_unwind();
    let (outcome, ending) = match served.await {
        Ok(ended) => ended,
        Err(panic) => (Outcome::Panicked, Ending::Panicked(panic)),
    };
    drop(running);
    report.status = ending.own_status(config).or(report.status);
    report.emit(outcome, None, config);
    drop(permit);
    ending
}

async fn serve<S, B, ResBody>(
    mut inner: S,
    mut request: Request<B>,
    config: &Config,
    report: &mut ReportFields,
    claim: Box<dyn KeylessClaim>,
) -> (Outcome, Ending<ResBody, S::Error>)
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes>,
{
    claim.attach(request.extensions_mut());
    let called = call(config.times.handler_timeout, || inner.call(request)).await;
    let (outcome, ending) = judge(called, |head| config.success.is(head), report);
    let is_success = outcome == Outcome::Completed;
    let settled = if is_success { claim.commit() } else { claim.rollback() };
    if let Err(error) = settled.await {
        let is_handlers = error.kind() == ErrorKind::Transaction;
        report.error = Some(error.into());
        // A rollback that failed changes the log record only.
        if is_success {
            return uncommitted(is_handlers);
        }
    }
    match outcome {
        Outcome::Completed | Outcome::Failed => (Outcome::Bypass, ending),
        outcome => (outcome, ending),
    }
}
