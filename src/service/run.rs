//! The task of one delivery: from `begin` to the answer.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBuilder};
use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode, request};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tower_service::Service;

use super::Shared;
use super::answer::{Answer, panic_message, status};
use crate::error::{Error, ErrorKind};
use crate::key::{Element, Keys};
use crate::ledger::{Begin, Claim, Ledger, Outcome as Handled};
use crate::observe::{self, Outcome, Report};
use crate::policy::{LogIds, OnInFlight, OnUnavailable};
use crate::response::DedupResult;

/// How a waiting delivery looks whether another *process* has finished its event; within this one
/// it is woken.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const SLOWEST_LOOK: Duration = Duration::from_millis(250);

/// A delivery that runs.
pub(super) struct Job<S, L> {
    inner: S,
    /// Whether `inner` was asked and said that it is ready.
    ready: bool,
    head: request::Parts,
    body: Bytes,
    keys: Keys,
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
        keys: Keys,
        shared: Arc<Shared<L>>,
        started: Instant,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self { inner, ready: true, head, body, keys, shared, started, permit: Some(permit) }
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

/// Runs a delivery to its end, and answers if somebody still listens.
pub(super) async fn run_to_the_end<S, L, B, ResBody>(
    mut job: Box<Job<S, L>>,
    listener: oneshot::Sender<Answer<S::Response, S::Error>>,
) where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    L: Ledger,
    B: From<Bytes>,
{
    let running = observe::Running::new(job.shared.config.key.namespace_str());
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
    if let Err(Answer::Panicked(panic)) = listener.send(answer) {
        let namespace = job.shared.config.key.namespace_str();
        observe::orphaned_panic(namespace, panic_message(&*panic));
    }
}

fn report<S, L, T, E>(job: &Job<S, L>, facts: &mut Facts, outcome: Outcome, answer: &Answer<T, E>) {
    let config = &job.shared.config;
    if let Answer::Own(result) = answer {
        facts.status = Some(status(*result, config));
    }
    Report {
        outcome,
        namespace: config.key.namespace_str(),
        key: Some(job.keys.first()),
        keys: job.keys.elements().len(),
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
) -> (Outcome, Answer<S::Response, S::Error>)
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    L: Ledger,
    B: From<Bytes>,
{
    let own = |outcome, result| (outcome, Answer::Own(result));
    let policy = job.shared.config.on_in_flight;
    let mut begun = begin(&job.shared, &job.keys).await;
    if let (Ok(Begin::InFlight), OnInFlight::Wait(bound)) = (&begun, policy) {
        // Boxed, for most deliveries do not wait and need not carry what waiting takes.
        begun = match Box::pin(job.wait(bound)).await {
            Waited::Begun(begun) => begun,
            Waited::NoPlace => return own(Outcome::Overloaded, DedupResult::InFlight),
            Waited::NoPermit => return own(Outcome::Overloaded, DedupResult::Unavailable),
        };
    }
    match begun {
        Ok(Begin::First { claim, others_in_flight }) => {
            handle(job, claim, others_in_flight, facts).await
        }
        Ok(Begin::Duplicate(seen)) => {
            facts.age = Some(seen.age);
            own(Outcome::Duplicate, DedupResult::Duplicate)
        }
        Ok(Begin::InFlight) if policy == OnInFlight::Acknowledge => {
            own(Outcome::InFlight, DedupResult::Duplicate)
        }
        Ok(Begin::InFlight) => own(Outcome::InFlight, DedupResult::InFlight),
        Ok(Begin::Mismatch(seen)) => {
            facts.age = Some(seen.age);
            own(Outcome::Mismatch, DedupResult::Mismatch)
        }
        Err(error) => {
            facts.error = Some(error);
            own(Outcome::Unavailable, DedupResult::Unavailable)
        }
    }
}

/// With a token of its own: whatever an earlier call of this delivery left behind may still be
/// being undone.
async fn begin<L: Ledger>(shared: &Shared<L>, keys: &Keys) -> Result<Begin<L::Claim>, Error> {
    shared.ledger.begin(keys, &shared.config.begin_context()).await
}

/// How waiting for another delivery ended.
enum Waited<C> {
    /// It began again.
    Begun(Result<Begin<C>, Error>),
    /// As many wait already as may.
    NoPlace,
    /// As many run as may, to the end of the wait.
    NoPermit,
}

impl<S: Clone, L: Ledger> Job<S, L> {
    /// Waits until the event's other delivery has ended, and begins again; past the bound, the
    /// last answer is still "in flight".
    async fn wait(&mut self, bound: Duration) -> Waited<L::Claim> {
        let shared = Arc::clone(&self.shared);
        let gate = &shared.gate;
        self.permit = None;
        let Ok(_place) = Arc::clone(&gate.waiting).try_acquire_owned() else {
            return Waited::NoPlace;
        };
        // Readiness is a place in somebody's limit: not to be held while doing nothing.
        let unready = self.inner.clone();
        drop(std::mem::replace(&mut self.inner, unready));
        self.ready = false;

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
            // Closed, whatever the policy: to run unprotected is for deliveries of which nothing
            // is known, and this one's event is known to be running.
            let context = shared.config.begin_context().on_unavailable(OnUnavailable::Closed);
            let begun = shared.ledger.begin(&self.keys, &context).await;
            let open = shared.config.on_unavailable == OnUnavailable::Open;
            let past = tokio::time::Instant::now() >= deadline;
            match begun {
                Err(_) if past && open => return Waited::Begun(Ok(Begin::InFlight)),
                Ok(Begin::InFlight) | Err(_) if !past => {}
                begun => return Waited::Begun(begun),
            }
            self.permit = None;
        }
    }
}

/// Runs the handler and settles its claim.
async fn handle<S, L, B, ResBody>(
    job: &mut Job<S, L>,
    mut claim: L::Claim,
    others_in_flight: bool,
    facts: &mut Facts,
) -> (Outcome, Answer<S::Response, S::Error>)
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    L: Ledger,
    B: From<Bytes>,
{
    let delivery = claim.delivery().clone();
    facts.attempt = Some((delivery.attempt(), delivery.takeover()));
    let answer = call(job, &mut claim).await;
    let ended = match &answer {
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
    let outcome = settle(ended, claim, facts).await;
    job.shared.gate.waiters.wake(delivery.elements().iter().flat_map(Element::identities));
    let answer = match (outcome, answer) {
        // The handler's doing is a 500; the store's is worth a retry.
        (Outcome::Uncommitted, _) => Answer::Own(match &facts.error {
            Some(error) if error.kind() == ErrorKind::Transaction => DedupResult::Uncommitted,
            _ => DedupResult::Unavailable,
        }),
        // The retry finds the rest done.
        (Outcome::Completed, _) if others_in_flight => {
            return (Outcome::Partial, Answer::Own(DedupResult::InFlight));
        }
        (_, Ok(answer)) => Answer::Inner(answer),
        (_, Err(panic)) => Answer::Panicked(panic),
    };
    (outcome, answer)
}

/// Commits or rolls back what a handler that ended so has claimed.
async fn settle<C: Claim>(ended: Outcome, claim: C, facts: &mut Facts) -> Outcome {
    let settled = match (ended, facts.status) {
        (Outcome::Completed, Some(status)) => claim.commit(&Handled::new(status)).await,
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
    if !job.ready {
        let ready = AssertUnwindSafe(poll_fn(|cx| job.inner.poll_ready(cx)));
        if let Err(error) = ready.catch_unwind().await? {
            return Ok(Err(error));
        }
    }
    let response = catch_unwind(AssertUnwindSafe(|| {
        let (head, body) = (std::mem::replace(&mut job.head, empty_head()), job.body.split_off(0));
        let mut request = Request::from_parts(head, B::from(body));
        request.extensions_mut().insert(claim.delivery().clone());
        claim.attach(request.extensions_mut());
        job.inner.call(request)
    }))?;
    AssertUnwindSafe(response).catch_unwind().await
}

fn empty_head() -> request::Parts {
    Request::new(()).into_parts().0
}
