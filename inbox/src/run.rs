//! The loop: takes due rows and delivers them to the application.
//!
//! 1. A process takes rows of its service, and of the namespaces whose layers it has and which all
//!    enforce their verdicts.
//! 2. As many rows run at once as there are slots. A free slot takes at once; otherwise the loop
//!    looks every second, ± 20 %.
//! 3. A run ends when its layer reports the end, not when the answer leaves: an outer timeout may
//!    answer first.
//! 4. A row that has not reached its layer after a minute is misrouted.

use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;
use tower_service::Service;

use crate::core::Core;
use crate::decide::{End, History, SOON, again, decide, is_of_no_handler, misrouted, spread};
use crate::ender::Run;
use crate::observe;
use crate::row::{Change, Counts, Fate, Parked, TakenRow};
use crate::table::{SWEPT, Took};
use crate::ticket::{Report, Ticket};

/// How often the loop looks for due rows.
const POLL: Duration = Duration::from_secs(1);
/// How long a request may take to reach its layer.
const REACH: Duration = Duration::from_secs(60);
/// How often the table is counted.
const COUNT: Duration = Duration::from_secs(15);
/// How often old rows are looked for.
const SWEEP: Duration = Duration::from_secs(60);

/// The largest take. Its reply, with bodies, arrives in time.
const TAKEN: usize = 16;
/// The most bytes of requests in the table.
const BYTES: u64 = 4 << 30;

/// Delivers the rows of an inbox to an application.
#[derive(Clone)]
pub(crate) struct Loop<S> {
    pub(crate) core: Arc<Core>,
    pub(crate) app: S,
}

impl<S, B> Loop<S>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    pub(crate) async fn run(self, stop: impl Future<Output = ()> + Send) {
        let mut stop = pin!(stop);
        let core = &self.core;
        let slots = Arc::new(Semaphore::new(core.settings.slots));
        let _keeper = AbortOnDropHandle::new(tokio::spawn(keep(Arc::clone(core))));
        loop {
            core.loop_is_alive();
            let pause = sleep(spread(POLL));
            let mut namespaces = core.namespaces();
            let free = slots.available_permits().min(TAKEN);
            let mut is_busy = false;
            if free > 0 && !namespaces.is_empty() {
                // Each namespace may be the first at the free slots.
                let first = rand::random_range(0..namespaces.len());
                namespaces.rotate_left(first);
                let took = core.table.take(&namespaces, free).await.unwrap_or_else(|error| {
                    observe::table_failed("no row is delivered again", &error);
                    Took::default()
                });
                is_busy = !took.rows.is_empty() || !took.lapsed.is_empty();
                for (namespace, parked) in took.lapsed {
                    observe::lapsed(&namespace, parked);
                }
                let has_stopped = stop.as_mut().now_or_never().is_some();
                for row in took.rows {
                    let run = core.ender.begin(row.at);
                    if has_stopped {
                        let (at, fate) = (row.at, again(Counts::Nothing, Duration::ZERO));
                        core.ender
                            .change_later(Change { at, fate, answered: false, last: None }, run);
                        continue;
                    }
                    // There are as many permits as rows were asked for.
                    let Ok(permit) = Arc::clone(&slots).acquire_owned().await else { break };
                    let (core, delivery) = (Arc::clone(core), self.clone().deliver(row, run));
                    tokio::spawn(async move {
                        delivery.await;
                        drop(permit);
                        core.wake.notify_one();
                    });
                }
                if has_stopped {
                    break;
                }
            }
            if is_busy && slots.available_permits() > 0 {
                continue;
            }
            tokio::select! {
                () = &mut stop => break,
                () = core.wake.notified() => {}
                () = pause => {}
            }
        }
        let all = u32::try_from(core.settings.slots).unwrap_or(u32::MAX);
        drop(slots.acquire_many(all).await);
        core.ender.flush().await;
    }

    /// Delivers one row, and changes it.
    async fn deliver(self, row: TakenRow, run: Run) {
        let (at, namespace, core) = (row.at, row.namespace.clone(), Arc::clone(&self.core));
        let (fate, last) = self.attempt(row).await;
        observe::ended(&namespace, at.seq, fate, &last, true);
        core.ender.change_later(Change { at, fate, answered: false, last: Some(last) }, run);
    }

    /// Delivers one row, and says what becomes of it, and why.
    async fn attempt(self, mut row: TakenRow) -> (Fate, String) {
        let Self { core, app } = self;
        let body = match row.body.take() {
            Some(body) => body,
            None => match core.table.show(row.at.seq).await {
                Ok(Some((_, request))) => request.body,
                Ok(None) => return (again(Counts::Nothing, SOON), "the row is gone".to_owned()),
                Err(error) => {
                    observe::table_failed("a large row is not read", &error);
                    return (again(Counts::Nothing, SOON), "the body was not read".to_owned());
                }
            },
        };
        let Some(mut request) = row.request(body) else {
            return (Fate::Park(Parked::Unreadable), "the row cannot be read".to_owned());
        };
        let (ticket, reported) = Ticket::new(core.address(), &row);
        request.extensions_mut().insert(ticket);
        let (report, status) = reach(app, request, reported).await;
        let (ran_nothing, why) = match (report, status) {
            (Report::Ended(end), _) => {
                let (attempts, answered) = (row.attempts, row.answered);
                let history = History { attempts, answered, is_redelivery: true };
                return (decide(&core.settings, end, history), end.text());
            }
            (Report::NotEnforced, _) => {
                let delay = core.settings.delay(row.attempts).unwrap_or(SOON);
                return (
                    again(Counts::Nothing, delay),
                    "the layer is not in the mode `Enforce`".to_owned(),
                );
            }
            (Report::Misrouted(why), _) => (true, why.to_owned()),
            (Report::Nothing | Report::Reached, Some(status)) => {
                let why = format!("{} without a layer of this inbox", status.as_u16());
                (is_of_no_handler(status), why)
            }
            (Report::Nothing | Report::Reached, None) => {
                (false, "no layer of this inbox within 60 s".to_owned())
            }
        };
        observe::misrouted(&row.namespace, row.at.seq, &why);
        (misrouted(&core.settings, ran_nothing, row.misrouted), format!("misrouted: {why}"))
    }
}

/// Calls the application, and waits for the report of the layer. Returns the last report, and the
/// status if the application has answered.
async fn reach<S, B>(
    app: S,
    request: Request<Full<Bytes>>,
    mut reported: watch::Receiver<Report>,
) -> (Report, Option<StatusCode>)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
{
    let end = Instant::now() + REACH;
    let mut call = pin!(AssertUnwindSafe(oneshot(app, request)).catch_unwind());
    let mut answer = None;
    loop {
        let report = *reported.borrow_and_update();
        // The answer may come before the layer has ended, and the layer may end without an answer.
        // A layer outside may have dropped the mark: then no report comes.
        let is_open = match report {
            Report::Nothing => answer.is_none(),
            Report::Reached => true,
            Report::Ended(_) | Report::Misrouted(_) | Report::NotEnforced => false,
        };
        if !is_open {
            return (report, answer);
        }
        tokio::select! {
            called = &mut call, if answer.is_none() => answer = Some(status_of(called)),
            Ok(()) = reported.changed() => {}
            () = sleep_until(end), if report == Report::Nothing => return (report, None),
            else => return (Report::Ended(End::Dropped), answer),
        }
    }
}

fn status_of<B, P>(called: Result<Result<Response<B>, Infallible>, P>) -> StatusCode {
    match called {
        Ok(Ok(response)) => response.status(),
        Ok(Err(never)) => match never {},
        Err(_panic) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn oneshot<S, T>(mut service: S, request: T) -> Result<S::Response, S::Error>
where
    S: Service<T>,
{
    std::future::poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}

/// Counts the rows, and ends those that are too old.
async fn keep(core: Arc<Core>) {
    let mut swept_at: Option<Instant> = None;
    let mut gauges = observe::Gauges::default();
    loop {
        if swept_at.is_none_or(|at| at.elapsed() >= SWEEP) {
            swept_at = Some(Instant::now());
            sweep(&core).await;
        }
        let start = Instant::now();
        match core.table.count().await {
            Ok(counts) => {
                let of_waiting = counts.iter().filter(|it| it.parked.is_none());
                let waiting: u64 = of_waiting.map(|it| it.rows).sum();
                let bytes: u64 = counts.iter().map(|it| it.bytes).sum();
                #[expect(clippy::cast_precision_loss, reason = "a ratio")]
                let ratio = |part: u64, whole: u64| part as f64 / whole as f64;
                let most = core.settings.max_waiting;
                let fullness = ratio(waiting, most).max(ratio(bytes, BYTES));
                core.is_full.store(fullness >= 1.0, Ordering::Relaxed);
                gauges.set(&counts, fullness);
            }
            Err(error) => observe::table_failed("rows are not counted", &error),
        }
        // A table of a million parked rows is counted for a twentieth of the time at most.
        sleep(spread(COUNT.max(20 * start.elapsed()))).await;
    }
}

/// Ends the rows that are too old.
async fn sweep(core: &Core) {
    loop {
        match core.table.sweep().await {
            Ok(swept) => {
                let is_last = swept.len() < SWEPT;
                observe::swept(swept);
                if is_last {
                    return;
                }
            }
            Err(error) => return observe::table_failed("old rows stay", &error),
        }
    }
}
