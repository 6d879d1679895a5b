//! The run of one delivery: from `begin` to the answer.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request, Response, StatusCode, request};
use http_body::Body;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tower_service::Service;

use super::answer::{Answer, DedupResult, panic_message, status};
use super::body::{self, Buffered, ResponseBody};
use super::config::Shared;
use super::paths::{HANDLED, Path};
use super::policy::{LogIds, OnInFlight, OnMismatch, OnUnavailable, Replay};
use crate::adapter::{Payloads, StoredResponse};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys};
use crate::ledger::{Begin, Claim, DuplicateInfo, HandlerSuccess, Ledger, Remainder};
use crate::observe::{self, Outcome, Report};

/// How a waiting delivery looks whether another *process* has finished its event; within this one
/// it is woken.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const SLOWEST_LOOK: Duration = Duration::from_millis(250);

/// A delivery that runs.
pub(super) struct Job<S, L> {
    /// Ready, but while the delivery waits for another one.
    inner: S,
    /// Taken when the handler is called.
    head: Option<request::Parts>,
    body: Bytes,
    keys: Keys,
    /// What is compared, if anything is.
    payloads: Option<Payloads>,
    path: Path,
    shared: Arc<Shared<L>>,
    started: Instant,
    /// Given up while it waits for another delivery.
    permit: Option<OwnedSemaphorePermit>,
}

impl<S, L> Job<S, L> {
    pub(super) fn new(
        inner: S,
        head: request::Parts,
        body: Bytes,
        (keys, payloads): (Keys, Option<Payloads>),
        shared: Arc<Shared<L>>,
        started: Instant,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let path = HANDLED.path(head.uri.path());
        let (head, permit) = (Some(head), Some(permit));
        Self { inner, head, body, keys, payloads, path, shared, started, permit }
    }
}

/// What is to be reported of the delivery, beside what the job knows.
#[derive(Default)]
struct Facts {
    attempt: Option<(u32, bool)>,
    age: Option<Duration>,
    status: Option<StatusCode>,
    error: Option<Error>,
}

/// Runs a delivery to its end.
#[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
pub(super) fn run_to_the_end<S, L, B, ResBody>(
    mut job: Box<Job<S, L>>,
) -> impl Future<Output = Answer<ResBody, S::Error>>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    L: Ledger,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    async move {
        let running = job.shared.config.meters.running();
        let mut facts = Facts::default();
        // An adapter or an extension that panics is treated as a handler that does; what its claim
        // holds is released when it is dropped.
        let delivery = AssertUnwindSafe(deliver::<S, L, B, ResBody>(&mut job, &mut facts));
        let (outcome, answer) = match delivery.catch_unwind().await {
            Ok(ended) => ended,
            Err(panic) => (Outcome::Panicked, Answer::Panicked(panic)),
        };
        drop(running);
        report(&job, &mut facts, outcome, &answer);
        answer
    }
}

/// The task of a delivery that waits for something: answers if somebody still listens.
pub(super) async fn answer_to<L, B, E>(
    listener: oneshot::Sender<Answer<B, E>>,
    delivery: Pin<Box<impl Future<Output = Answer<B, E>>>>,
    shared: Arc<Shared<L>>,
) {
    if let Err(Answer::Panicked(panic)) = listener.send(delivery.await) {
        let namespace = shared.config.key.namespace_str();
        observe::orphaned_panic(namespace, panic_message(&*panic));
    }
}

fn report<S, L, B, E>(job: &Job<S, L>, facts: &mut Facts, outcome: Outcome, answer: &Answer<B, E>) {
    let config = &job.shared.config;
    match answer {
        Answer::Own(result) => facts.status = Some(status(*result, config)),
        Answer::Replay(response) => facts.status = Some(response.status),
        Answer::Inner(_) | Answer::Panicked(_) => {}
    }
    Report {
        outcome,
        meters: &config.meters,
        key: Some(job.keys.first()),
        keys: job.keys.events().len(),
        plain_ids: config.log_ids == LogIds::Plain,
        attempt: facts.attempt,
        age: facts.age,
        status: facts.status,
        duration: job.started.elapsed(),
        error: facts.error.as_ref().map(|error| error as _),
    }
    .emit();
}

async fn deliver<S, L, B, ResBody>(
    job: &mut Job<S, L>,
    facts: &mut Facts,
) -> (Outcome, Answer<ResBody, S::Error>)
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    L: Ledger,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    let own = |outcome, result| (outcome, Answer::Own(result));
    let policy = job.shared.config.on_in_flight;
    let mut begun = begin(&job.shared, &job.keys, job.payloads.as_ref()).await;
    if let (Ok(Begin::InFlight), OnInFlight::Wait(bound)) = (&begun, policy) {
        // Boxed, for most deliveries do not wait and need not carry what waiting takes.
        begun = match Box::pin(job.wait::<B>(bound)).await {
            Waited::Begun(begun) => begun,
            Waited::NoPlace => return own(Outcome::Overloaded, DedupResult::InFlight),
            Waited::NoPermit => return own(Outcome::Overloaded, DedupResult::Unavailable),
            Waited::Failed(error) => return (Outcome::Failed, Answer::Inner(Err(error))),
        };
    }
    let is_acknowledged = match &begun {
        Ok(Begin::Duplicate(_) | Begin::Mismatch(_)) => true,
        Ok(Begin::InFlight) => policy == OnInFlight::Acknowledge,
        Ok(Begin::First { .. }) | Err(_) => false,
    };
    if is_acknowledged && HANDLED.is_elsewhere(job.keys.first(), job.path) {
        job.shared.config.meters.handled_on_another_path(job.keys.first());
    }
    match begun {
        Ok(Begin::First { claim, others }) => handle(job, claim, others, facts).await,
        Ok(Begin::Duplicate(known)) => {
            facts.age = Some(known.age);
            (Outcome::Duplicate, duplicate(known))
        }
        Ok(Begin::Mismatch(known)) => {
            facts.age = Some(known.age);
            match job.shared.config.on_mismatch() {
                OnMismatch::Report => (Outcome::Mismatch, duplicate(known)),
                OnMismatch::Refuse => own(Outcome::Mismatch, DedupResult::Mismatch),
            }
        }
        Ok(Begin::InFlight) if policy == OnInFlight::Acknowledge => {
            own(Outcome::InFlight, DedupResult::Duplicate)
        }
        Ok(Begin::InFlight) => own(Outcome::InFlight, DedupResult::InFlight),
        Err(error) => {
            facts.error = Some(error);
            own(Outcome::Unavailable, DedupResult::Unavailable)
        }
    }
}

/// As the first delivery was answered, if that was kept.
fn duplicate<B, E>(known: DuplicateInfo) -> Answer<B, E> {
    known.response.map_or(Answer::Own(DedupResult::Duplicate), Answer::Replay)
}

/// With a token of its own: whatever an earlier call of this delivery left behind may still be
/// being undone.
async fn begin<L: Ledger>(
    shared: &Shared<L>,
    keys: &Keys,
    payloads: Option<&Payloads>,
) -> Result<Begin<L::Claim>, Error> {
    shared.ledger.begin(keys, &shared.config.begin_context(payloads)).await
}

/// How waiting for another delivery ended.
enum Waited<C, E> {
    /// It began again.
    Begun(Result<Begin<C>, Error>),
    /// As many wait already as may.
    NoPlace,
    /// To the end of the wait, no permit was free or the inner service was not ready.
    NoPermit,
    /// The inner service failed while it was asked whether it is ready.
    Failed(E),
}

impl<S, L: Ledger> Job<S, L> {
    /// Waits until the event's other delivery has ended, and begins again; past the bound, the
    /// last answer is still "in flight".
    ///
    /// Every delivery takes its permit, then the inner service's readiness, then its claim. A
    /// delivery that claimed first would hold a transaction while it waits for a place in an inner
    /// limit, and those who hold the places may wait for that transaction.
    async fn wait<B>(&mut self, bound: Duration) -> Waited<L::Claim, S::Error>
    where
        S: Service<Request<B>> + Clone,
    {
        let shared = Arc::clone(&self.shared);
        let gate = &shared.gate;
        self.permit = None;
        let Ok(_place) = Arc::clone(&gate.waiting).try_acquire_owned() else {
            return Waited::NoPlace;
        };
        self.give_readiness_up();

        let waiter = gate.waiters.wait_for(self.keys.first());
        let notify = waiter.notify();
        let mut woken = pin!(notify.notified());
        woken.as_mut().enable();
        let deadline = tokio::time::Instant::now() + bound.min(Duration::from_secs(86_400));
        let mut looks = ExponentialBuilder::new()
            .with_min_delay(FIRST_LOOK)
            .with_max_delay(SLOWEST_LOOK)
            .with_jitter()
            .without_max_times()
            .build();
        loop {
            let look = tokio::time::Instant::now() + looks.next().unwrap_or(SLOWEST_LOOK);
            tokio::select! {
                () = woken.as_mut() => {}
                () = tokio::time::sleep_until(look.min(deadline)) => {}
            }
            // Before the next look, so that an end between the look and the wait is not missed.
            woken.set(notify.notified());
            woken.as_mut().enable();
            let permit = match gate.permit_to_run() {
                Some(permit) => permit,
                None => {
                    let permit = Arc::clone(&gate.running).acquire_owned();
                    match tokio::time::timeout_at(deadline, permit).await {
                        Ok(Ok(permit)) => permit,
                        _ => return Waited::NoPermit,
                    }
                }
            };
            self.permit = Some(permit);
            let ready = poll_fn(|cx| self.inner.poll_ready(cx));
            match tokio::time::timeout_at(deadline, ready).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Waited::Failed(error),
                Err(_elapsed) => return Waited::NoPermit,
            }
            // Closed, whatever the policy: to run unprotected is for deliveries of which nothing
            // is known, and this one's event is known to be running.
            let context = shared.config.begin_context(self.payloads.as_ref()).fail_open(false);
            let begun = shared.ledger.begin(&self.keys, &context).await;
            let open = shared.config.on_unavailable == OnUnavailable::Open;
            let past = tokio::time::Instant::now() >= deadline;
            match begun {
                Err(_) if past && open => return Waited::Begun(Ok(Begin::InFlight)),
                Ok(Begin::InFlight) | Err(_) if !past => {}
                begun => return Waited::Begun(begun),
            }
            self.permit = None;
            self.give_readiness_up();
        }
    }

    /// Readiness is a place in somebody's limit: not to be held while doing nothing.
    fn give_readiness_up(&mut self)
    where
        S: Clone,
    {
        let unready = self.inner.clone();
        drop(std::mem::replace(&mut self.inner, unready));
    }
}

/// Runs the handler and settles its claim.
async fn handle<S, L, B, ResBody>(
    job: &mut Job<S, L>,
    mut claim: L::Claim,
    others: Remainder,
    facts: &mut Facts,
) -> (Outcome, Answer<ResBody, S::Error>)
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    L: Ledger,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    let delivery = claim.delivery().clone();
    // Before it runs: on arrival, a twin on another path is a duplicate from here on.
    delivery.keys().for_each(|key| HANDLED.insert(key, job.path));
    facts.attempt = Some((delivery.attempt(), delivery.is_takeover()));
    // Whose response has no body, where that to a GET has one.
    let is_head = job.head.as_ref().is_some_and(|head| head.method == Method::HEAD);
    let mut answer = match call(job, &mut claim).await {
        Ok(answer) => Ok(answer.map(|response| response.map(ResponseBody::inner))),
        Err(panic) => Err(panic),
    };
    let mut ended = match &answer {
        Ok(Ok(response)) => {
            facts.status = Some(response.status());
            if job.shared.config.success.is(response.status()) {
                Outcome::Completed
            } else {
                Outcome::Failed
            }
        }
        Ok(Err(_)) => Outcome::Failed,
        Err(_panic) => Outcome::Panicked,
    };
    let mut handled = HandlerSuccess::default();
    if let (Ok(Ok(response)), Some(replay), [only]) =
        (&mut answer, &job.shared.config.replay, job.keys.events())
        && ended == Outcome::Completed
        && !is_head
    {
        let (response, time) = (std::mem::take(response), job.shared.config.body_timeout);
        let kept = Box::pin(kept(response, replay, time, only.key()));
        // A body that panics is a handler that does.
        match AssertUnwindSafe(kept).catch_unwind().await {
            Ok(Some((response, stored))) => {
                handled.response = stored;
                answer = Ok(Ok(response));
            }
            Ok(None) => ended = Outcome::BrokenResponse,
            Err(panic) => {
                ended = Outcome::Panicked;
                answer = Err(panic);
            }
        }
    }
    let outcome = settle(ended, claim, &handled, facts).await;
    job.shared.gate.waiters.wake(delivery.events().iter().flat_map(Event::identities));
    let own = |outcome, result| (outcome, Answer::Own(result));
    match (outcome, answer) {
        // The handler's doing is a 500; the store's is worth a retry.
        (Outcome::Uncommitted, _) => match &facts.error {
            Some(error) if error.kind() == ErrorKind::Transaction => {
                own(outcome, DedupResult::Uncommitted)
            }
            _ => own(outcome, DedupResult::Unavailable),
        },
        (Outcome::BrokenResponse, _) => own(outcome, DedupResult::BrokenResponse),
        // The retry finds the rest done.
        (Outcome::Completed, _) if others.in_flight => own(Outcome::Partial, DedupResult::InFlight),
        (Outcome::Completed, _)
            if others.mismatch && job.shared.config.on_mismatch() == OnMismatch::Refuse =>
        {
            own(Outcome::Mismatch, DedupResult::Mismatch)
        }
        (outcome, Ok(answer)) => (outcome, Answer::Inner(answer)),
        (outcome, Err(panic)) => (outcome, Answer::Panicked(panic)),
    }
}

/// Reads a response to keep it: the response to give, and what of it is stored, if it can be.
/// `None` if its body ends in an error.
async fn kept<ResBody: Body<Data = Bytes>>(
    response: Response<ResponseBody<ResBody>>,
    replay: &Replay,
    time: Duration,
    key: &DedupKey,
) -> Option<(Response<ResponseBody<ResBody>>, Option<Arc<StoredResponse>>)> {
    let (head, body) = response.into_parts();
    let Some(body) = body.into_inner() else {
        return Some((Response::from_parts(head, ResponseBody::own()), None));
    };
    let (body, stored) = match body::buffer_response(body, replay.limit(), time).await.ok()? {
        Buffered::Whole(bytes, body) => match replay.select(&head.headers) {
            Ok(headers) => {
                let stored = StoredResponse::new(head.status, headers, bytes);
                (body, Some(Arc::new(stored)))
            }
            Err(why) => {
                observe::response_not_kept(key, why);
                (body, None)
            }
        },
        Buffered::Not(why, body) => {
            observe::response_not_kept(key, why);
            (body, None)
        }
    };
    Some((Response::from_parts(head, body), stored))
}

/// Commits or rolls back what a handler that ended so has claimed.
#[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
fn settle<C: Claim>(
    ended: Outcome,
    claim: C,
    handled: &HandlerSuccess,
    facts: &mut Facts,
) -> impl Future<Output = Outcome> {
    async move {
        let settled = match ended {
            Outcome::Completed => claim.commit(handled).await,
            // Boxed, for most deliveries succeed.
            _ => Box::pin(claim.rollback()).await,
        };
        match settled {
            Ok(()) => ended,
            Err(error) => {
                facts.error = Some(error);
                // Whether a release came through is for the log only.
                if ended == Outcome::Completed { Outcome::Uncommitted } else { ended }
            }
        }
    }
}

/// Calls the inner service, and catches its panic.
async fn call<S, L, B>(
    job: &mut Job<S, L>,
    claim: &mut L::Claim,
) -> Result<Result<S::Response, S::Error>, Box<dyn Any + Send>>
where
    S: Service<Request<B>>,
    L: Ledger,
    B: From<Bytes>,
{
    let response = catch_unwind(AssertUnwindSafe(|| {
        let head = job.head.take().unwrap_or_else(empty_head);
        let body = std::mem::take(&mut job.body);
        let mut request = Request::from_parts(head, B::from(body));
        let delivery = claim.delivery().clone();
        delivery.belongs_to(&job.keys);
        request.extensions_mut().insert(delivery);
        claim.attach(request.extensions_mut());
        job.inner.call(request)
    }))?;
    AssertUnwindSafe(response).catch_unwind().await
}

fn empty_head() -> request::Parts {
    Request::new(()).into_parts().0
}
