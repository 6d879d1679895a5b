//! [`Run`]: the way of one delivery, from its claim to its ending.
//!
//! begin → (wait → begin) → call the handler → store its response → settle the claim → ending.

use std::any::Any;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request, Response, request};
use http_body::Body;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tower_service::Service;

use super::answer::{DedupResult, Ending, panic_message};
use super::body::{Buffered, ResponseBody, buffer_response};
use super::config::Shared;
use super::gate::{NotAdmitted, Permit, give_up_readiness};
use super::paths::{HANDLED, Path};
use super::policy::{OnInFlight, OnMismatch, OnUnavailable, Replay};
use super::report::ReportFields;
use crate::adapter::{Payloads, StoredResponse};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys};
use crate::ledger::{
    Begin, Claim, DuplicateInfo, HandlerSuccess, Ledger, Remainder, deadline_in, poll_delays,
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
    /// The digests of what is compared, if anything is.
    pub(super) payloads: Option<Payloads>,
    pub(super) path: Path,
    pub(super) shared: Arc<Shared<L>>,
    /// Returned while the delivery waits for another one.
    pub(super) permit: Option<Permit>,
    pub(super) report: ReportFields,
    pub(super) inner_body: PhantomData<fn() -> B>,
}

/// Awaits a delivery in a task of its own and sends its ending to the caller, if there still is
/// one.
pub(super) async fn finish_detached<L, B, E>(
    caller: oneshot::Sender<Ending<B, E>>,
    delivery: Pin<Box<impl Future<Output = Ending<B, E>>>>,
    shared: Arc<Shared<L>>,
) {
    if let Err(Ending::Panicked(panic)) = caller.send(delivery.await) {
        let namespace = shared.config.key.namespace_str();
        observe::orphaned_panic(namespace, panic_message(&*panic));
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
enum Called<R, E> {
    Returned(Result<R, E>),
    Panicked(Box<dyn Any + Send>),
    TimedOut,
}

impl<S, L, B, ResBody> Run<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    L: Ledger,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    /// Runs the delivery to its end and reports it.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
    pub(super) fn to_the_end(
        mut self: Box<Self>,
    ) -> impl Future<Output = Ending<ResBody, S::Error>> {
        async move {
            let running = self.shared.config.meters.running();
            // A panic of an adapter or an extension counts as one of the handler. The claim is
            // released when it is dropped.
            let (outcome, ending) = match AssertUnwindSafe(self.deliver()).catch_unwind().await {
                Ok(ended) => ended,
                Err(panic) => (Outcome::Panicked, Ending::Panicked(panic)),
            };
            drop(running);
            let config = &self.shared.config;
            self.report.status = ending.own_status(config).or(self.report.status);
            self.report.emit(outcome, Some(&self.keys), config);
            ending
        }
    }

    async fn deliver(&mut self) -> (Outcome, Ending<ResBody, S::Error>) {
        let policy = self.shared.config.on_in_flight;
        let mut begun = self.begin(self.shared.config.on_unavailable).await;
        if let (Ok(Begin::InFlight), OnInFlight::Wait(bound)) = (&begun, policy) {
            // Boxed: most deliveries do not wait, and their future stays small.
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
        if is_acknowledged && HANDLED.is_elsewhere(self.keys.first(), self.path) {
            self.shared.config.meters.handled_on_another_path(self.keys.first());
        }
        match begun {
            Ok(Begin::First { claim, others }) => self.handle(claim, others).await,
            Ok(Begin::Duplicate(info)) => {
                self.report.age = Some(info.age);
                (Outcome::Duplicate, duplicate(info))
            }
            Ok(Begin::Mismatch(info)) => {
                self.report.age = Some(info.age);
                match self.shared.config.on_mismatch() {
                    OnMismatch::Report => (Outcome::Mismatch, duplicate(info)),
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
        let Shared { ledger, config, .. } = &*self.shared;
        let context = config.begin_context(self.payloads.as_ref());
        let fail_open = on_unavailable == OnUnavailable::Open;
        ledger.begin(&self.keys, &context.fail_open(fail_open)).await
    }

    /// Waits until the event's other delivery has ended, and begins again. Past the bound, the last
    /// reply stays "in flight".
    async fn wait(&mut self, bound: Duration) -> Waited<L::Claim, S::Error> {
        let shared = Arc::clone(&self.shared);
        let gate = &shared.gate;
        self.permit = None;
        let Some(_place) = gate.try_wait() else { return Waited::NoPlace };
        give_up_readiness(&mut self.inner);

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
            // Registered before the next `begin`: an end between that and the next wait must wake.
            woken.set(notify.notified());
            woken.as_mut().enable();
            match gate.run_by(&mut self.inner, deadline).await {
                Ok(permit) => self.permit = Some(permit),
                Err(not_admitted) => return Waited::NotAdmitted(not_admitted),
            }
            // Closed, whatever the policy: this event is known to run elsewhere, so an error of the
            // store must not start it unprotected.
            let begun = self.begin(OnUnavailable::Closed).await;
            let is_open = shared.config.on_unavailable == OnUnavailable::Open;
            let is_past = Instant::now() >= deadline;
            match begun {
                Err(_) if is_past && is_open => return Waited::Begun(Ok(Begin::InFlight)),
                Ok(Begin::InFlight) | Err(_) if !is_past => {}
                begun => return Waited::Begun(begun),
            }
            self.permit = None;
            give_up_readiness(&mut self.inner);
        }
    }

    /// Runs the handler and settles its claim.
    async fn handle(
        &mut self,
        mut claim: L::Claim,
        others: Remainder,
    ) -> (Outcome, Ending<ResBody, S::Error>) {
        let delivery = claim.delivery().clone();
        // Before the handler runs: under the on-arrival ledger, a delivery of this event on another
        // path is a duplicate from now on.
        delivery.keys().for_each(|key| HANDLED.insert(key, self.path));
        self.report.attempt = Some((delivery.attempt(), delivery.is_takeover()));
        // The response to a HEAD has no body, where the response to a GET has one.
        let is_head = self.head.as_ref().is_some_and(|head| head.method == Method::HEAD);
        let called = self.call(&mut claim).await;
        let (mut outcome, mut ending) = self.judge(called);
        let mut success = HandlerSuccess::default();
        if let (Ending::Inner(Ok(response)), Some(replay), [only]) =
            (&mut ending, &self.shared.config.replay, self.keys.events())
            && outcome == Outcome::Completed
            && !is_head
        {
            let (response, time) = (std::mem::take(response), self.shared.config.body_timeout);
            let stored = Box::pin(store_response(response, replay, time, only.key()));
            // A panic of the body counts as one of the handler.
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
        let settled = settle(outcome, claim, &success).await;
        self.shared.gate.waiters.wake(delivery.events().iter().flat_map(Event::identities));
        if let Err(error) = settled {
            let is_handlers = error.kind() == ErrorKind::Transaction;
            self.report.error = Some(error.into());
            // A release that failed is for the log record only.
            if outcome == Outcome::Completed {
                // A transaction that the handler broke is a 500. A commit that the store failed is
                // worth a retry.
                let result =
                    if is_handlers { DedupResult::Uncommitted } else { DedupResult::Unavailable };
                return own(Outcome::Uncommitted, result);
            }
        }
        if outcome == Outcome::Completed {
            // The retry finds these events complete and runs the rest.
            if others.in_flight {
                return own(Outcome::Partial, DedupResult::InFlight);
            }
            if others.mismatch && self.shared.config.on_mismatch() == OnMismatch::Refuse {
                return own(Outcome::Mismatch, DedupResult::Mismatch);
            }
        }
        (outcome, ending)
    }

    /// Calls the inner service, within its timeout, and catches its panic.
    async fn call(&mut self, claim: &mut L::Claim) -> Called<S::Response, S::Error> {
        let called = catch_unwind(AssertUnwindSafe(|| {
            let head = self.head.take().unwrap_or_else(|| Request::new(()).into_parts().0);
            let body = std::mem::take(&mut self.body);
            let mut request = Request::from_parts(head, B::from(body));
            let delivery = claim.delivery().clone();
            delivery.belongs_to(&self.keys);
            request.extensions_mut().insert(delivery);
            claim.attach(request.extensions_mut());
            self.inner.call(request)
        }));
        let handler = match called {
            Ok(handler) => handler,
            Err(panic) => return Called::Panicked(panic),
        };
        let mut handler = pin!(AssertUnwindSafe(handler).catch_unwind());
        // Past its timeout the handler is dropped when this function returns: before the claim is
        // settled.
        let returned = match self.shared.config.times.handler_timeout {
            None => handler.await,
            Some(bound) => match timeout(bound, handler.as_mut()).await {
                Ok(returned) => returned,
                Err(_elapsed) => return Called::TimedOut,
            },
        };
        returned.map_or_else(Called::Panicked, Called::Returned)
    }

    /// Decides whether the handler succeeded.
    fn judge(
        &mut self,
        called: Called<S::Response, S::Error>,
    ) -> (Outcome, Ending<ResBody, S::Error>) {
        match called {
            Called::Returned(Ok(response)) => {
                let (head, body) = response.into_parts();
                self.report.status = Some(head.status);
                let is_success = self.shared.config.success.is(&head);
                let outcome = if is_success { Outcome::Completed } else { Outcome::Failed };
                let response = Response::from_parts(head, ResponseBody::inner(body));
                (outcome, Ending::Inner(Ok(response)))
            }
            Called::Returned(Err(error)) => (Outcome::Failed, Ending::Inner(Err(error))),
            Called::Panicked(panic) => (Outcome::Panicked, Ending::Panicked(panic)),
            Called::TimedOut => own(Outcome::HandlerTimeout, DedupResult::HandlerTimeout),
        }
    }
}

const fn own<B, E>(outcome: Outcome, result: DedupResult) -> (Outcome, Ending<B, E>) {
    (outcome, Ending::Own(result))
}

/// Returns the stored response to the first delivery, if there is one.
fn duplicate<B, E>(info: DuplicateInfo) -> Ending<B, E> {
    info.response.map_or(Ending::Own(DedupResult::Duplicate), Ending::Replay)
}

/// Reads a response so that it can be stored: returns the response to send and, if it can be
/// stored, what is stored. Returns `None` if its body ends in an error.
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
#[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
fn settle<C: Claim>(
    outcome: Outcome,
    claim: C,
    success: &HandlerSuccess,
) -> impl Future<Output = Result<(), Error>> {
    async move {
        match outcome {
            Outcome::Completed => claim.commit(success).await,
            // Boxed: most deliveries succeed, and their future stays small.
            _ => Box::pin(claim.rollback()).await,
        }
    }
}
