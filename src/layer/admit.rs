//! From a buffered request to a delivery that runs.
//!
//! [`Run::dispatch`] reads the keys and takes a permit. [`Run::start`] starts the delivery, and
//! moves it to a task at its first wait. Until `start`, the request has claimed nothing, so it can
//! be dropped at any time.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::lazy;
use futures_util::{FutureExt, TryFutureExt};
use http::{Request, Response};
use http_body::Body;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_service::Service;
use tracing::{Instrument, Span};

use super::answer::{self, Ending, panic_message};
#[cfg(feature = "axum")]
use super::body::{BODY_LIMIT, raise_limit_of_axum};
use super::body::{BodyFault, ResponseBody};
use super::builder::DedupLayer;
use super::end::{self, DeliveryEnd};
use super::gate::Permit;
use super::mode::Mode;
use super::request::{NOT_VERIFIED, Run, caught};
use crate::adapter::contract::Fetch;
use crate::delivery::{Delivery, Verdict};
use crate::error::KeyErrorKind;
use crate::ledger::RunsWithoutKey;
use crate::observe::{self, DedupAnswer, Outcome};

/// What happens to a request whose body was read.
pub(super) enum Dispatch<B, E> {
    /// The inner service handles the request, which is not deduplicated; or the delivery runs in a
    /// task.
    Waiting(EndingFuture<B, E>),
    /// The request has ended.
    Ended(Ending<B, E>),
}

pub(super) type EndingFuture<B, E> = Pin<Box<dyn Future<Output = Ending<B, E>> + Send>>;

impl<S, L, B, ResBody> Run<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    L: 'static,
    B: From<Bytes> + Send + 'static,
    ResBody: Body<Data = Bytes> + Send + 'static,
{
    /// Treats a buffered request as the mode of the layer says.
    pub(super) fn dispatch(
        mut self: Box<Self>,
        body: Bytes,
        cx: &mut Context<'_>,
    ) -> Dispatch<ResBody, S::Error> {
        self.body = body;
        #[cfg(feature = "axum")]
        if self.layer.config.body_limit > BODY_LIMIT {
            raise_limit_of_axum(&mut self.head.extensions, self.layer.config.body_limit);
        }
        if !self.layer.config.deduplicates(&self.head.method) {
            return self.forward(None);
        }
        // The only read of the mode, because a delivery keeps its mode to its end.
        match self.layer.gate.mode.get() {
            Mode::Enforce => self.enforce(cx),
            Mode::Shadow => self.shadow(cx),
            Mode::Off => self.off(),
        }
    }

    /// Reads the keys, takes a permit, and starts the delivery.
    fn enforce(mut self: Box<Self>, cx: &mut Context<'_>) -> Dispatch<ResBody, S::Error> {
        let config = &self.layer.config;
        if !self.is_verified() {
            self.report.error = Some(NOT_VERIFIED.into());
            return Dispatch::Ended(self.answer(Outcome::Unverified));
        }
        self.report_unverified();
        let read = caught(|| {
            let is_answered = config.key.is_handshake(&self.request_ref());
            if is_answered { Ok(None) } else { self.request_keys().map(Some) }
        });
        match read {
            Ok(None) => return Dispatch::Ended(self.answer(Outcome::Handshake)),
            Ok(Some(keys)) => self.keys = keys,
            Err(error) => {
                let outcome = match error.kind() {
                    KeyErrorKind::MissingScope => Outcome::Unscoped,
                    // Some senders deliver no event again after a 400.
                    KeyErrorKind::Panicked => Outcome::Unavailable,
                    _ => Outcome::InvalidKey,
                };
                self.report.error = Some(error.into());
                return Dispatch::Ended(self.answer(outcome));
            }
        }
        let extensions = &self.head.extensions;
        let outer = extensions.get::<Delivery>();
        let is_nested = if self.keys.is_empty() {
            extensions.get::<RunsWithoutKey>().is_some()
        } else {
            self.is_nested(Delivery::holds)
        };
        if is_nested {
            if let (Some(outer), true) = (outer, self.layer.ledger.demands_commit()) {
                outer.demand_commit();
            }
            return self.forward_nested();
        }
        if !self.keys.is_empty() && outer.is_some_and(Delivery::demands_commit) {
            // The handler's transaction would complete the events of this layer, and never those of
            // the outer one.
            self.report.error = Some(TWO_DEMANDS.into());
            return Dispatch::Ended(self.answer(Outcome::Uncommitted));
        }
        self.open_span();
        let gate = &self.layer.gate;
        self.permit = gate.running.try_acquire();
        if self.permit.is_none() {
            if let Some(place) = gate.place_behind_turns() {
                return Dispatch::Waiting(Box::pin(self.start_behind_turns(place)));
            }
            // The last turn may just have ended.
            self.permit = gate.running.try_acquire();
        }
        if self.permit.is_some() {
            self.start(cx)
        } else {
            Dispatch::Ended(self.answer(Outcome::Overloaded))
        }
    }

    /// Waits for a permit of a delivery that claims again after a wait, for as long as a call of
    /// the store may take. It has claimed nothing until then, so its caller may drop it.
    async fn start_behind_turns(mut self: Box<Self>, place: Permit) -> Ending<ResBody, S::Error> {
        // A drain waits for this request too.
        let counted = self.layer.gate.tasks.token();
        let bound = self.layer.config.times.store_timeout;
        self.permit = timeout(bound, self.layer.gate.running.acquire()).await.ok().flatten();
        drop(place);
        if self.permit.is_none() {
            return self.answer(Outcome::Overloaded);
        }
        let started = lazy(|cx| self.start(cx)).await;
        drop(counted);
        match started {
            Dispatch::Waiting(ending) => ending.await,
            Dispatch::Ended(ending) => ending,
        }
    }

    /// Starts a delivery in shadow, whatever is wrong with it.
    fn shadow(mut self: Box<Self>, cx: &mut Context<'_>) -> Dispatch<ResBody, S::Error> {
        let fault = self.read_in_shadow();
        if self.keys.is_empty() && fault.is_none() {
            self.report.emit(Outcome::Bypass, &[], &self.layer.config.meters);
            return self.forward(None);
        }
        if self.is_nested(Delivery::is_judged) {
            return self.forward_nested();
        }
        let refused = self.admit_in_shadow(fault);
        self.open_span();
        let (layer, span) = (Arc::clone(&self.layer), self.report.span.clone());
        run_detached(Box::pin(self.to_the_end_in_shadow(refused)), layer, span, cx)
    }

    /// Calls the inner service as if the layer were not there, except that a handler which takes a
    /// [`Delivery`] gets one.
    fn off(mut self) -> Dispatch<ResBody, S::Error> {
        // The `Delivery` of an outer layer stays: it knows which events are complete.
        let outer = self.head.extensions.get::<Delivery>();
        let is_judged = outer.is_some_and(|outer| outer.verdict() != Verdict::Off);
        if !is_judged
            && let (keys, _) = self.extract_leniently()
            && !keys.is_empty()
        {
            let keys = keys.without_payloads();
            let DedupLayer { ledger, config, .. } = &*self.layer;
            let calls = config.calls(ledger, Fetch::Nothing);
            let delivery = ledger.unenforced(keys.events(), Verdict::Off, None, calls);
            delivery.set_request(&keys);
            self.head.extensions.insert(delivery);
        }
        self.forward(Some(DeliveryEnd::Undecided))
    }

    /// Lets a request through that an outer layer runs.
    fn forward_nested(self) -> Dispatch<ResBody, S::Error> {
        let (meters, keys) = (&self.layer.config.meters, &self.keys);
        if !keys.is_empty() && meters.is_first_nested() {
            observe::records::nested(meters.namespace());
        }
        self.report.emit(Outcome::Bypass, keys.events(), meters);
        self.forward(None)
    }

    /// Starts a delivery that has its permit, if it needs one. It runs to its end, whatever the
    /// caller does.
    fn start(self: Box<Self>, cx: &mut Context<'_>) -> Dispatch<ResBody, S::Error> {
        let (layer, span) = (Arc::clone(&self.layer), self.report.span.clone());
        // Two boxes, each below 1 KiB, because common allocators are faster below that size.
        run_detached(Box::pin(self.to_the_end()), layer, span, cx)
    }

    /// Calls the inner service. The response reports this end, if the request asks.
    fn forward(mut self, end: Option<DeliveryEnd>) -> Dispatch<ResBody, S::Error> {
        let end = end.filter(|_| self.reports_end);
        let request = Request::from_parts(self.head, B::from(self.body));
        let response = self.inner.call(request).map_ok(move |mut response| {
            end::set(&mut response, end);
            response.map(ResponseBody::inner)
        });
        Dispatch::Waiting(Box::pin(response.map(Ok)))
    }
}

impl<S, L, B> Run<S, L, B> {
    /// Refuses a request whose body was not read to its end.
    pub(super) fn refuse_body<R, E>(&mut self, fault: BodyFault) -> Ending<R, E> {
        let outcome = fault.outcome();
        if let BodyFault::Broken(error) = fault {
            self.report.error = Some(error);
        }
        self.answer(outcome)
    }

    fn answer<R, E>(&mut self, outcome: Outcome) -> Ending<R, E> {
        let ending = answer::own(outcome.answer(), &self.layer.config);
        self.report(outcome, &ending);
        ending
    }
}

const TWO_DEMANDS: &str = "an outer layer demands a commit of its own event: put both keys into one layer, as key and \
                           alias, or set this layer to shadow";

/// Polls a delivery once, and moves it to a task if it waits.
fn run_detached<L: 'static, B: 'static, R: Send + 'static, E: Send + 'static>(
    mut delivery: Pin<Box<impl Future<Output = Ending<R, E>> + Send + 'static>>,
    layer: Arc<DedupLayer<L, B>>,
    span: Span,
    cx: &mut Context<'_>,
) -> Dispatch<R, E> {
    let running = layer.gate.tasks.token();
    // No caller can drop the delivery during this poll. A delivery that ends in it needs no task,
    // which would cost more than all other steps of this function.
    if let Poll::Ready(ending) = span.in_scope(|| delivery.as_mut().poll(cx)) {
        drop((delivery, running));
        return Dispatch::Ended(ending);
    }
    let (caller, ending) = oneshot::channel();
    let namespace = Arc::clone(&layer.config.key.namespace);
    let task = async move {
        if let Err(Err(panic)) = caller.send(delivery.await) {
            // The caller is gone.
            observe::records::orphaned_panic(&namespace, panic_message(&*panic));
        }
    };
    // A delivery without a span of its own stays in the span of its request.
    let span = if span.is_disabled() { Span::current() } else { span };
    layer.gate.tasks.spawn(task.instrument(span));
    Dispatch::Waiting(Box::pin(async move {
        // The runtime drops the task when it shuts down.
        let dropped = |_| answer::own(DedupAnswer::Unavailable, &layer.config);
        ending.await.unwrap_or_else(dropped)
    }))
}
