//! [`Run`]: one delivery, from its claim to its ending.
//!
//! [`Run::to_the_end`] takes these steps:
//!
//! 1. `begin` claims the keys.
//! 2. `wait`: while another delivery runs the event, it waits and begins again.
//! 3. `call_handler` calls the handler. `judge` decides whether the handler succeeded.
//! 4. `store_response` reads the response of a success, if duplicates get it.
//! 5. `settle` commits the claim of a success, and rolls back any other claim.
//! 6. `conclude` decides how the delivery ends.
//!
//! # What happens if a future is dropped?
//!
//! - *The caller's future*, because the client hangs up: nothing. The delivery runs in its own task,
//!   and no one drops it. A request that is not deduplicated has no [`Run`]: the inner service's future is
//!   dropped with the caller's.
//! - *The handler's future*, because it runs longer than `handler_timeout`, or panics: `call_handler`
//!   drops it before step 5. Step 5 then rolls the claim back.
//! - *The delivery itself*, because the runtime shuts down: a caller that still waits answers 503. The
//!   claim is dropped, but the runtime starts no task that could release it. So a lease lapses, and the
//!   retry runs as a takeover. A transaction is rolled back. On arrival, an event whose handler has not
//!   ended is lost.

use std::any::Any;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request, Response, request, response};
use http_body::Body;
use tokio::time::{Instant, sleep_until, timeout};
use tower_service::Service;

use super::answer::{DedupResult, Ending};
use super::body::{Buffered, ResponseBody, buffer_response};
use super::config::{Config, ServiceState};
use super::gate::{NotAdmitted, Permit, release_readiness};
use super::paths::{LAST_PATHS, Path};
use super::policy::{OnInFlight, OnMismatch, OnUnavailable, Replay};
use super::report::ReportFields;
use crate::adapter::{Payloads, StoredResponse};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys};
use crate::ledger::{
    Begin, Claim, DuplicateInfo, HandlerSuccess, Ledger, deadline_in, poll_delays,
};
use crate::observe::{self, Outcome};

/// A delivery that runs.
pub(super) struct Run<S, L, B> {
    /// Ready, except while the delivery waits for another one.
    pub(super) inner: S,
    /// Taken when the handler is called.
    pub(super) head: Option<request::Parts>,
    pub(super) body: Bytes,
    pub(super) keys: Keys,
    /// The digests of the payloads, if the layer compares payloads.
    pub(super) payloads: Option<Payloads>,
    pub(super) path: Path,
    pub(super) service: Arc<ServiceState<L>>,
    /// `None` while the delivery waits for another one.
    pub(super) permit: Option<Permit>,
    pub(super) report: ReportFields,
    pub(super) inner_body: PhantomData<fn() -> B>,
}

impl<S, L, B, ResBody> Run<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    L: Ledger,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    /// Runs the delivery to its end and reports it.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
    pub(super) fn to_the_end(
        mut self: Box<Self>,
    ) -> impl Future<Output = Ending<ResBody, S::Error>> {
        async move {
            let running = self.service.config.meters.running();
            // A panic in `success_when`, in an extension or in a response body counts as a panic of the
            // handler. The dropped claim is released. The ledger catches the panics of an adapter.
            let (outcome, ending) = match AssertUnwindSafe(self.deliver()).catch_unwind().await {
                Ok(ended) => ended,
                Err(panic) => (Outcome::Panicked, Ending::Panicked(panic)),
            };
            drop(running);
            let config = &self.service.config;
            self.report.status = ending.own_status(config).or(self.report.status);
            self.report.emit(outcome, Some(&self.keys), config);
            ending
        }
    }

    async fn deliver(&mut self) -> (Outcome, Ending<ResBody, S::Error>) {
        let policy = self.service.config.on_in_flight;
        let mut begun = self.begin(self.service.config.on_unavailable).await;
        if let (Ok(Begin::InFlight), OnInFlight::Wait(bound)) = (&begun, policy) {
            // Boxed, because most deliveries do not wait and their future stays small.
            begun = match Box::pin(self.wait(bound)).await {
                Waited::Begun(begun) => begun,
                Waited::NoPlace => return own(Outcome::Overloaded, DedupResult::InFlight),
                Waited::NotAdmitted(NotAdmitted::Full) => {
                    return own(Outcome::Overloaded, DedupResult::Unavailable);
                }
                Waited::NotAdmitted(NotAdmitted::Inner(error)) => {
                    return (Outcome::Failed, Ending::Inner(Err(error)));
                }
            };
        }
        let is_acknowledged = match &begun {
            Ok(Begin::Duplicate(_) | Begin::Mismatch(_)) => true,
            Ok(Begin::InFlight) => policy == OnInFlight::Acknowledge,
            Ok(Begin::First { .. }) | Err(_) => false,
        };
        if is_acknowledged && LAST_PATHS.is_elsewhere(self.keys.first(), self.path) {
            self.service.config.meters.handled_on_another_path(self.keys.first());
        }
        match begun {
            Ok(Begin::First { claim, in_flight, mismatch }) => {
                let (outcome, ending) = self.run_handler(claim).await;
                // The retry finds the events of this run complete, and runs the others.
                if outcome == Outcome::Completed && in_flight {
                    return own(Outcome::InFlight, DedupResult::InFlight);
                }
                if outcome == Outcome::Completed
                    && mismatch
                    && self.service.config.on_mismatch() == OnMismatch::Refuse
                {
                    return own(Outcome::Mismatch, DedupResult::Mismatch);
                }
                (outcome, ending)
            }
            Ok(Begin::Duplicate(info)) => {
                self.report.age = Some(info.age);
                (Outcome::Duplicate, duplicate(info, &self.service.config))
            }
            Ok(Begin::Mismatch(info)) => {
                self.report.age = Some(info.age);
                match self.service.config.on_mismatch() {
                    OnMismatch::Report => {
                        (Outcome::Mismatch, duplicate(info, &self.service.config))
                    }
                    OnMismatch::Refuse => own(Outcome::Mismatch, DedupResult::Mismatch),
                }
            }
            Ok(Begin::InFlight) if policy == OnInFlight::Acknowledge => {
                own(Outcome::InFlight, DedupResult::Duplicate)
            }
            Ok(Begin::InFlight) => own(Outcome::InFlight, DedupResult::InFlight),
            Err(error) => {
                self.report.error = Some(error.into());
                own(Outcome::Unavailable, DedupResult::Unavailable)
            }
        }
    }

    /// Claims the keys under a new token: an earlier call of this delivery may still be released in
    /// the background.
    async fn begin(&mut self, on_unavailable: OnUnavailable) -> Result<Begin<L::Claim>, Error> {
        let ServiceState { ledger, config, .. } = &*self.service;
        let context = config.begin_context(self.payloads.as_ref());
        let fail_open = on_unavailable == OnUnavailable::Open;
        ledger.begin(&self.keys, &context.fail_open(fail_open)).await
    }

    /// Waits until the event's other delivery has ended, and begins again. Past the bound, the event
    /// counts as in flight.
    async fn wait(&mut self, bound: Duration) -> Waited<L::Claim, S::Error> {
        let service = Arc::clone(&self.service);
        let gate = &service.gate;
        self.permit = None;
        let Some(_place) = gate.try_wait() else { return Waited::NoPlace };
        let _waiting = service.config.meters.waiting();
        release_readiness(&mut self.inner);

        let waiter = gate.waiters.wait_for(self.keys.first());
        let notify = waiter.notify();
        let mut woken = pin!(notify.notified());
        woken.as_mut().enable();
        let deadline = deadline_in(bound);
        let mut delays = poll_delays();
        loop {
            let poll = Instant::now() + delays.next().unwrap_or_default();
            tokio::select! {
                () = woken.as_mut() => {}
                () = sleep_until(poll.min(deadline)) => {}
            }
            // Registered before the next `begin`: the other delivery may end between that and the next
            // wait, and must wake this one.
            woken.set(notify.notified());
            woken.as_mut().enable();
            match gate.run_by(&mut self.inner, deadline).await {
                Ok(permit) => self.permit = Some(permit),
                Err(not_admitted) => return Waited::NotAdmitted(not_admitted),
            }
            // Closed, whatever the policy: another delivery runs this event, so an error of the store
            // must not start it unprotected.
            let begun = self.begin(OnUnavailable::Closed).await;
            let is_undecided = matches!(begun, Ok(Begin::InFlight) | Err(_));
            let may_wait_longer = Instant::now() < deadline;
            if !(is_undecided && may_wait_longer) {
                let is_open = service.config.on_unavailable == OnUnavailable::Open;
                let begun = if begun.is_err() && is_open { Ok(Begin::InFlight) } else { begun };
                return Waited::Begun(begun);
            }
            self.permit = None;
            release_readiness(&mut self.inner);
        }
    }

    /// Runs the handler, settles the claim, and wakes the deliveries that wait for this event.
    async fn run_handler(&mut self, mut claim: L::Claim) -> (Outcome, Ending<ResBody, S::Error>) {
        let delivery = claim.delivery().clone();
        // Set before the handler runs: under the on-arrival ledger, a delivery of this event on another
        // path is a duplicate from now on.
        delivery.keys().for_each(|key| LAST_PATHS.insert(key, self.path));
        self.report.attempt = Some((delivery.attempt(), delivery.is_takeover()));
        // The response to a HEAD has no body, where the response to a GET has one.
        let is_head = self.head.as_ref().is_some_and(|head| head.method == Method::HEAD);
        let called = self.call_handler(&mut claim).await;
        let (mut outcome, mut ending) =
            judge(called, |head| self.service.config.success.is(head), &mut self.report);
        let mut success = HandlerSuccess::default();
        if let (Ending::Inner(Ok(response)), Some(replay), [only]) =
            (&mut ending, &self.service.config.replay, self.keys.events())
            && outcome == Outcome::Completed
            && !is_head
        {
            let (response, time) = (std::mem::take(response), self.service.config.body_timeout);
            let stored = Box::pin(store_response(response, replay, time, only.key()));
            // A panic of the body counts as a panic of the handler.
            match AssertUnwindSafe(stored).catch_unwind().await {
                Ok(Some((response, stored))) => {
                    success.response = stored;
                    ending = Ending::Inner(Ok(response));
                }
                Ok(None) => {
                    (outcome, ending) = own(Outcome::BrokenResponse, DedupResult::BrokenResponse);
                }
                Err(panic) => (outcome, ending) = (Outcome::Panicked, Ending::Panicked(panic)),
            }
        }
        let result = settle(outcome, claim, &success).await;
        self.service.gate.waiters.wake(delivery.events().iter().flat_map(Event::identities));
        self.conclude(outcome, ending, result)
    }

    /// Calls the inner service, within its timeout, and catches its panic.
    fn call_handler(
        &mut self,
        claim: &mut L::Claim,
    ) -> impl Future<Output = Called<S::Response, S::Error>> {
        let Self { inner, head, body, keys, service, .. } = self;
        call(service.config.times.handler_timeout, move || {
            let head = head.take().unwrap_or_else(|| Request::new(()).into_parts().0);
            let mut request = Request::from_parts(head, B::from(std::mem::take(body)));
            let delivery = claim.delivery().clone();
            delivery.set_request(keys);
            request.extensions_mut().insert(delivery);
            claim.attach(request.extensions_mut());
            inner.call(request)
        })
    }

    /// Decides how a delivery ends whose claim was settled with `result`.
    fn conclude(
        &mut self,
        outcome: Outcome,
        ending: Ending<ResBody, S::Error>,
        result: Result<(), Error>,
    ) -> (Outcome, Ending<ResBody, S::Error>) {
        if let Err(error) = result {
            let is_handlers = error.kind() == ErrorKind::Transaction;
            self.report.error = Some(error.into());
            // A release that failed changes the log record only.
            if outcome == Outcome::Completed {
                return uncommitted(is_handlers);
            }
        }
        (outcome, ending)
    }
}

/// How waiting for another delivery ended.
enum Waited<C, E> {
    /// The delivery began again.
    Begun(Result<Begin<C>, Error>),
    /// `max_waiting` deliveries wait already.
    NoPlace,
    NotAdmitted(NotAdmitted<E>),
}

/// How the call of the handler ended.
pub(super) enum Called<R, E> {
    Returned(Result<R, E>),
    Panicked(Box<dyn Any + Send>),
    TimedOut,
}

/// Calls the handler, within its timeout, and catches its panic. The handler is dropped before this
/// returns: nothing runs once the claim is settled.
pub(super) async fn call<F, R, E>(
    bound: Option<Duration>,
    handler: impl FnOnce() -> F,
) -> Called<R, E>
where
    F: Future<Output = Result<R, E>>,
{
    let handler = match catch_unwind(AssertUnwindSafe(handler)) {
        Ok(handler) => handler,
        Err(panic) => return Called::Panicked(panic),
    };
    let mut handler = pin!(AssertUnwindSafe(handler).catch_unwind());
    let returned = match bound {
        None => handler.await,
        Some(bound) => match timeout(bound, handler.as_mut()).await {
            Ok(returned) => returned,
            Err(_elapsed) => return Called::TimedOut,
        },
    };
    returned.map_or_else(Called::Panicked, Called::Returned)
}

/// Decides whether the handler succeeded.
pub(super) fn judge<ResBody, E>(
    called: Called<Response<ResBody>, E>,
    is_success: impl FnOnce(&response::Parts) -> bool,
    report: &mut ReportFields,
) -> (Outcome, Ending<ResBody, E>) {
    match called {
        Called::Returned(Ok(response)) => {
            let (head, body) = response.into_parts();
            report.status = Some(head.status);
            let outcome = if is_success(&head) { Outcome::Completed } else { Outcome::Failed };
            let response = Response::from_parts(head, ResponseBody::inner(body));
            (outcome, Ending::Inner(Ok(response)))
        }
        Called::Returned(Err(error)) => (Outcome::Failed, Ending::Inner(Err(error))),
        Called::Panicked(panic) => (Outcome::Panicked, Ending::Panicked(panic)),
        Called::TimedOut => own(Outcome::HandlerTimeout, DedupResult::HandlerTimeout),
    }
}

/// Returns the answer to a success that was not committed, because of the handler or of the store. If
/// the store failed the commit, a retry may succeed.
pub(super) const fn uncommitted<B, E>(is_handlers: bool) -> (Outcome, Ending<B, E>) {
    let result = if is_handlers { DedupResult::Uncommitted } else { DedupResult::Unavailable };
    own(Outcome::Uncommitted, result)
}

const fn own<B, E>(outcome: Outcome, result: DedupResult) -> (Outcome, Ending<B, E>) {
    (outcome, Ending::Own(result))
}

/// Returns the stored response to the first delivery, if there is one.
fn duplicate<B, E>(info: DuplicateInfo, config: &Config) -> Ending<B, E> {
    match info.response {
        Some(response) => Ending::Replay(response),
        None if config.duplicate_status.is_success() => Ending::Own(DedupResult::Duplicate),
        None => Ending::Own(DedupResult::ResponseNotStored),
    }
}

/// Reads a response. Returns the response to send, and the stored response if it can be stored.
/// Returns `None` if its body ends in an error.
async fn store_response<ResBody: Body<Data = Bytes>>(
    response: Response<ResponseBody<ResBody>>,
    replay: &Replay,
    time: Duration,
    key: &DedupKey,
) -> Option<(Response<ResponseBody<ResBody>>, Option<Arc<StoredResponse>>)> {
    let (head, body) = response.into_parts();
    let Some(body) = body.into_inner() else {
        return Some((Response::from_parts(head, ResponseBody::own()), None));
    };
    let (selected, body) = match buffer_response(body, replay.limit(), time).await.ok()? {
        Buffered::Whole(bytes, body) => {
            let headers = replay.select(&head.headers);
            (headers.map(|headers| StoredResponse::new(head.status, headers, bytes)), body)
        }
        Buffered::Not(reason, body) => (Err(reason), body),
    };
    let stored = match selected {
        Ok(stored) => Some(Arc::new(stored)),
        Err(reason) => {
            observe::response_not_stored(key, reason);
            None
        }
    };
    Some((Response::from_parts(head, body), stored))
}

/// Commits the claim of a handler that succeeded, and rolls back any other.
#[expect(clippy::manual_async_fn, reason = "an `async fn` stores its arguments twice")]
pub(super) fn settle<C: Claim>(
    outcome: Outcome,
    claim: C,
    success: &HandlerSuccess,
) -> impl Future<Output = Result<(), Error>> {
    async move {
        match outcome {
            Outcome::Completed => claim.commit(success).await,
            // Boxed, because most deliveries succeed and their future stays small.
            _ => Box::pin(claim.rollback()).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::Full;
    use tower::util::BoxCloneSyncService;

    use super::*;
    use crate::ledger::Lease;

    type Handler = BoxCloneSyncService<Request<Full<Bytes>>, Response<Full<Bytes>>, Infallible>;

    fn size_of_future<A, F: Future>(_: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    /// Common allocators are faster up to 1,024 bytes.
    #[test]
    fn both_boxes_of_a_delivery_are_small() {
        let delivery = Run::<Handler, Lease, Full<Bytes>>::to_the_end;
        let sizes = [size_of::<Run<Handler, Lease, Full<Bytes>>>(), size_of_future(delivery)];
        assert!(sizes.iter().all(|size| *size <= 1_024), "{sizes:?}");
    }
}
