//! The loop: takes due rows and delivers them to the application.
//!
//! 1. A process takes rows of its service, and of the namespaces whose layers it has and which all enforce their verdicts.
//! 2. As many run at once as there are slots. A free slot takes at once; otherwise the loop looks every second, ± 20 %.
//! 3. A run ends by the report of its layer, not by the answer: an outer timeout may answer first.
//! 4. What has not reached its layer after a minute is misrouted.

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
use tokio::time::{Instant, sleep, timeout};
use tower_dedup::adapter::contract::Token;
use tower_service::Service;

use crate::decide::{End, History, decide, misrouted, spread};
use crate::inbox::Core;
use crate::observe::{self, Seldom};
use crate::row::{Change, Counts, Fate, Parked, TakenRow};
use crate::table::Take;
use crate::ticket::{Report, Ticket};

/// How often the loop looks for due rows.
const POLL: Duration = Duration::from_secs(1);
/// How long a request may take to reach its layer.
const REACH: Duration = Duration::from_secs(60);
/// How often the table is counted.
const COUNT: Duration = Duration::from_secs(15);
/// How often old rows are looked for.
const SWEEP: Duration = Duration::from_secs(60);

pub(crate) async fn run<S, B>(core: Arc<Core>, app: S, stop: impl Future<Output = ()> + Send)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    let mut stop = pin!(stop);
    let slots = Arc::new(Semaphore::new(core.settings.slots));
    let keeper = tokio::spawn(keep(Arc::clone(&core)));
    let keeper = AbortOnDrop(keeper.abort_handle());
    // Namespaces take turns at the first slots.
    let mut first = 0_usize;
    loop {
        core.loop_is_alive();
        let pause = sleep(spread(POLL));
        let mut namespaces = core.namespaces();
        let free = slots.available_permits();
        let mut is_busy = false;
        if free > 0 && !namespaces.is_empty() {
            let shift = first % namespaces.len();
            namespaces.rotate_left(shift);
            first = first.wrapping_add(1);
            let take = Take {
                service: &core.service,
                namespaces: &namespaces,
                each: free.div_ceil(namespaces.len()),
                most: free,
                turn: Token::random(),
                lasts: core.settings.turn,
                delays: &core.settings.delays,
            };
            match core.table.take(take).await {
                Ok(took) => {
                    is_busy = !took.rows.is_empty() || !took.lapsed.is_empty();
                    for (namespace, parked) in took.lapsed {
                        observe::lapsed(&namespace, parked);
                    }
                    let has_stopped = stop.as_mut().now_or_never().is_some();
                    for row in took.rows {
                        core.begin(row.at);
                        if has_stopped {
                            let fate = Fate::Due { after: Duration::ZERO, counts: Counts::Nothing };
                            core.change_later(Change {
                                at: row.at,
                                fate,
                                answered: false,
                                last: None,
                            });
                            continue;
                        }
                        // There are as many permits as rows were asked for.
                        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else { break };
                        let (core, app) = (Arc::clone(&core), app.clone());
                        tokio::spawn(async move {
                            deliver(&core, app, row).await;
                            drop(permit);
                            core.wake.notify_one();
                        });
                    }
                    if has_stopped {
                        break;
                    }
                }
                Err(error) => observe::table_failed("no row is delivered again", &error),
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
    core.flush().await;
    drop(keeper);
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Delivers one row, and says what becomes of it.
async fn deliver<S, B>(core: &Core, app: S, row: TakenRow)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    static SELDOM: Seldom = Seldom::new();
    let history = History {
        attempts: row.attempts,
        misrouted: row.misrouted,
        answered: row.answered,
        is_redelivery: true,
    };
    let ended = match row.request() {
        None => Reached::Never(None),
        Some(mut request) => {
            let inbox = std::ptr::from_ref(core) as usize;
            let (ticket, reported) =
                Ticket::new(inbox, &row.namespace, &row.keys, row.verified.as_deref());
            request.extensions_mut().insert(ticket);
            reach(app, request, reported).await
        }
    };
    let miss = |status, why: &str| {
        observe::misrouted(&row.namespace, row.at.seq, why, &SELDOM);
        misrouted(&core.settings, status, history)
    };
    let (fate, last) = match ended {
        Reached::Never(_) if row.request().is_none() => {
            (Fate::Park(Parked::Unreadable), "the row cannot be read".to_owned())
        }
        Reached::Never(status) => {
            let text = status.map_or_else(|| "no answer".to_owned(), |it| it.as_u16().to_string());
            (miss(status, "no layer of this inbox was reached"), format!("misrouted: {text}"))
        }
        Reached::Layer(End::Response { .. } | End::Failed | End::Dropped, Report::OtherKeys) => {
            let why = "a layer with other keys, or of another namespace, was reached";
            (miss(None, why), "misrouted: other keys".to_owned())
        }
        Reached::Layer(_, Report::NotEnforced) => {
            let delay = core.settings.delay(history.attempts).unwrap_or(POLL);
            let fate = Fate::Due { after: spread(delay), counts: Counts::Nothing };
            (fate, "the layer is not in the mode `Enforce`".to_owned())
        }
        Reached::Layer(end, _) => (decide(&core.settings, end, history).fate, end.text()),
    };
    observe::ended(&row.namespace, row.at.seq, fate, &last, true);
    core.change_later(Change { at: row.at, fate, answered: false, last: Some(last) });
}

/// What a redelivery has met.
enum Reached {
    /// No layer. The status is that of the answer, if there is one.
    Never(Option<StatusCode>),
    Layer(End, Report),
}

/// Calls the application, and waits for the report of the layer.
async fn reach<S, B>(
    app: S,
    request: Request<Full<Bytes>>,
    mut reported: watch::Receiver<Report>,
) -> Reached
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    S: Clone,
{
    let start = Instant::now();
    let mut call = pin!(AssertUnwindSafe(oneshot(app, request)).catch_unwind());
    let mut status = None;
    let mut is_answered = false;
    // Somebody has taken the request apart: its layer cannot be reached any more, and a handler may run.
    let mut is_unmarked = false;
    loop {
        let report = *reported.borrow_and_update();
        match report {
            Report::Ended(end) => return Reached::Layer(end, report),
            Report::OtherKeys | Report::NotEnforced => return Reached::Layer(End::Dropped, report),
            // The answer may come before the layer has ended, and the layer without an answer.
            Report::Reached if is_answered => drop(reported.changed().await),
            Report::Reached => tokio::select! {
                called = &mut call => (is_answered, status) = (true, status_of(called)),
                _ = reported.changed() => {}
            },
            Report::Nothing if is_answered => return Reached::Never(status),
            Report::Nothing => {
                let left = REACH.saturating_sub(start.elapsed());
                tokio::select! {
                    called = &mut call => (is_answered, status) = (true, status_of(called)),
                    changed = reported.changed(), if !is_unmarked => is_unmarked = changed.is_err(),
                    () = sleep(left) => {
                        return Reached::Never(is_unmarked.then_some(StatusCode::GATEWAY_TIMEOUT));
                    }
                }
            }
        }
    }
}

/// A panic outside of the layer has no status: a handler without the inbox may have run.
fn status_of<B, P>(called: Result<Result<Response<B>, Infallible>, P>) -> Option<StatusCode> {
    match called {
        Ok(Ok(response)) => Some(response.status()),
        Ok(Err(never)) => match never {},
        Err(_) => Some(StatusCode::INTERNAL_SERVER_ERROR),
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
    loop {
        if swept_at.is_none_or(|at| at.elapsed() >= SWEEP) {
            swept_at = Some(Instant::now());
            match core.table.sweep().await {
                Ok(swept) => observe::swept(&swept),
                Err(error) => observe::table_failed("old rows stay", &error),
            }
        }
        let counted = timeout(COUNT, async {
            let counts = core.table.count().await?;
            Ok::<_, crate::table::TableError>((counts, core.table.bytes().await?))
        });
        if let Ok(Ok((counts, bytes))) = counted.await {
            let waiting: u64 =
                counts.iter().filter(|it| it.parked.is_none()).map(|it| it.rows).sum();
            #[expect(clippy::cast_precision_loss, reason = "a ratio")]
            let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
            let settings = &core.settings;
            let fullness =
                ratio(waiting, settings.max_waiting).max(ratio(bytes, settings.max_bytes));
            core.is_full.store(fullness >= 1.0, Ordering::Relaxed);
            observe::counted(&counts, fullness);
        }
        sleep(spread(COUNT)).await;
    }
}
