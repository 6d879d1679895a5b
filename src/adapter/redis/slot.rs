//! [`Slot`]: the open connections of an adapter, and the calls over them.
//!
//! `redis` connects again after an error of the socket only. A connection that is silent, and one to a server
//! that is no primary any more, stay as they are. So connections are in *doubt* after a reply that did not
//! come, after a call that was dropped before its reply, after an error of the socket, and after a refusal that
//! another server might not send. Connections in doubt are replaced.
//!
//! 1. One task opens the next connections for all callers. It goes on if a caller goes away.
//! 2. A call that has failed over connections in doubt waits for the next ones. Other calls go on over them, because in
//!    a cluster the other primaries still reply.
//! 3. In a cluster, open connections are replaced only by ones that reach every primary. While a primary hangs, new
//!    ones would serve no other key better, and each of their calls there would hold up all others: `redis` looks
//!    for the slots again, and asks the silent primary too.
//! 4. A call is repeated within its time, because every script is idempotent by its token: a claim finds its own
//!    row, or another version than it names. If one attempt may have been executed, the outcome of the call is
//!    unknown.
//! 5. `WAIT` holds up everything behind it on its connection, and waits for the writes of its own connection
//!    only. So a call that waits for replicas is one script with its `WAIT`, on one of a few further connections.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::client::{Connection, RedisClient};
use super::errors::Failure;
use super::options::RedisOptions;
use super::script::ScriptCall;
use super::server::{self, Servers, wrong_scheme};
use crate::error::StoreError;

/// How many calls wait for replicas at the same time.
const WAITING: usize = 8;
/// An opening begins no earlier after the one before.
const OPENING_PAUSE: Duration = Duration::from_millis(200);
/// Sentinels take up to 1.5 s each to reply, which `redis` sets.
const SENTINELS: Duration = Duration::from_secs(5);

/// The pauses before a repetition.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// Open connections to the same servers.
pub(super) struct Live {
    pub(super) main: Connection,
    /// For the calls that wait for replicas.
    waiting: Vec<Connection>,
    knows_flags: bool,
    /// The next connections replace these. Set from the beginning if not every primary has been looked at.
    is_doubted: AtomicBool,
}

impl Live {
    fn is_doubted(&self) -> bool {
        self.is_doubted.load(Ordering::Relaxed)
    }
}

type Opening = Shared<BoxFuture<'static, Result<Arc<Live>, Failure>>>;

/// The connections of one adapter.
pub(super) struct Slot {
    pub(super) client: RedisClient,
    pub(super) options: RedisOptions,
    servers: Servers,
    state: Mutex<State>,
    /// Chooses the connection of a call that waits for replicas.
    turn: AtomicUsize,
}

#[derive(Default)]
struct State {
    current: Option<Arc<Live>>,
    /// The next connections.
    opening: Option<Opening>,
    /// When the last opening began.
    began: Option<Instant>,
    is_closed: bool,
}

/// What bounds the attempts of a call.
#[derive(Clone, Copy)]
pub(super) struct Bound {
    /// What the call does, for its error.
    pub(super) context: &'static str,
    pub(super) deadline: Instant,
    /// The call may be sent once.
    pub(super) is_once: bool,
}

impl Slot {
    pub(super) fn new(client: RedisClient, options: RedisOptions) -> Arc<Self> {
        let (servers, state, turn) = (Servers::default(), Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self { client, options, servers, state, turn })
    }

    /// Opens a connection, and checks the servers. Tries once.
    ///
    /// # Errors
    ///
    /// [`ConfigError`](crate::ConfigError) for a server that may not be used;
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable) if none can be reached.
    pub(super) async fn connect(self: &Arc<Self>) -> Result<(), StoreError> {
        match self.live(None).await {
            Ok(_) => Ok(()),
            Err(Failure::Unfit(fault)) => Err(fault.into()),
            Err(failure) => Err(failure.into_error("connecting to Redis")),
        }
    }

    /// Returns the bound of a call that begins now.
    pub(super) fn bound(&self, context: &'static str) -> Bound {
        Bound { context, deadline: Instant::now() + self.options.call_timeout, is_once: false }
    }

    /// Runs a script on the primary of its key, by its hash; by its text, if the server does not know the hash. A
    /// script that writes waits for replicas, if the options say so.
    pub(super) async fn run(
        self: &Arc<Self>,
        call: &ScriptCall,
        bound: Bound,
    ) -> Result<Value, StoreError> {
        let wait = self.options.wait_replicas.filter(|_| call.writes());
        let turn = wait.map_or(0, |_| self.turn.fetch_add(1, Ordering::Relaxed));
        let send = |live: Arc<Live>| async move {
            let send = |by_hash| {
                let command = call.command(live.knows_flags, by_hash);
                send_script(&live, turn, command, wait)
            };
            match send(true).await {
                Err(failure) if failure.is_unknown_script() => send(false).await,
                reply => reply,
            }
        };
        self.repeat(bound, send).await
    }

    /// Sends something over the open connections, until that succeeds, fails for good, or the time of the call is up.
    pub(super) async fn repeat<T, F>(
        self: &Arc<Self>,
        bound: Bound,
        send: impl Fn(Arc<Live>) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let (mut pause, mut failed, mut before) = (FIRST_PAUSE, None, None::<StoreError>);
        loop {
            let failure = match self.send(bound.deadline, &mut failed, &send).await {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            let is_last = bound.is_once
                || !failure.is_worth_repeating()
                || Instant::now() + pause >= bound.deadline;
            // After an error with an unknown outcome, a refusal does not make the outcome known. After a refusal, a wait
            // for another connection leaves it known.
            let is_unsent = matches!(failure, Failure::Unsent);
            let error = failure.into_error(bound.context);
            let error = match before {
                Some(before) if is_unsent || before.is_unknown() && !error.is_unknown() => before,
                _ => error,
            };
            if is_last {
                return Err(error);
            }
            before = Some(error);
            sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
            pause = LONGEST_PAUSE.min(2 * pause);
        }
    }

    /// Sends something over the open connections, until `deadline` at most. `failed` are the connections in doubt over
    /// which the attempt before has failed.
    async fn send<T, F>(
        self: &Arc<Self>,
        deadline: Instant,
        failed: &mut Option<Arc<Live>>,
        send: impl FnOnce(Arc<Live>) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let live = timeout_at(deadline, self.live(failed.as_ref())).await;
        let live = live.unwrap_or(Err(Failure::Unsent))?;
        let until = deadline.min(Instant::now() + self.options.reply_timeout());
        let mut sent = Sent { live: &live, is_doubt: true };
        let reply = timeout_at(until, send(Arc::clone(&live))).await;
        let reply = reply.unwrap_or(Err(Failure::TimedOut));
        sent.is_doubt = reply.as_ref().is_err_and(|failure| failure.is_doubt(&self.client));
        drop(sent);
        *failed = live.is_doubted().then_some(live);
        reply
    }

    /// Returns the open connections. Opens the next ones, if there are none, or if these are in doubt. Waits for the
    /// next ones, if there are none, or if these are the ones that have `failed`.
    async fn live(self: &Arc<Self>, failed: Option<&Arc<Live>>) -> Result<Arc<Live>, Failure> {
        let opening = {
            let mut state = self.state();
            if state.is_closed {
                return Err(Failure::Closed);
            }
            let current = state.current.clone();
            if let Some(live) = current.as_ref().filter(|live| !live.is_doubted()) {
                return Ok(Arc::clone(live));
            }
            let opening = self.opening(&mut state);
            match current {
                Some(live) if failed.is_none_or(|failed| !Arc::ptr_eq(failed, &live)) => {
                    return Ok(live);
                }
                _ => opening,
            }
        };
        let opened = opening.await?;
        let state = self.state();
        if state.is_closed {
            Err(Failure::Closed)
        } else {
            Ok(state.current.clone().unwrap_or(opened))
        }
    }

    /// Returns the opening that is under way. Otherwise starts the task of another one, which ends by itself, because it
    /// has a bound, or with its runtime.
    fn opening(self: &Arc<Self>, state: &mut State) -> Opening {
        if let Some(opening) = &state.opening {
            return opening.clone();
        }
        let now = Instant::now();
        let begins = state.began.map_or(now, |began| now.max(began + OPENING_PAUSE));
        let slot = Arc::clone(self);
        let bound = SENTINELS + 2 * (slot.options.connect_timeout + slot.options.response_timeout);
        let task = tokio::spawn(async move {
            sleep_until(begins).await;
            timeout(bound, slot.open()).await
        });
        let opened = task.map(|opened| match opened {
            Ok(Ok(opened)) => opened,
            _ => Err(Failure::TimedOut),
        });
        let opening = opened.boxed().shared();
        (state.opening, state.began) = (Some(opening.clone()), Some(begins));
        opening
    }

    /// Opens connections, and checks their servers.
    async fn open(&self) -> Result<Arc<Live>, Failure> {
        let count = self.options.wait_replicas.map_or(1, |_| 1 + WAITING);
        let mut waiting = self.client.connect(&self.options, count).await.map_err(|error| {
            let is_no_cluster = error.to_string().contains("cluster support disabled");
            if is_no_cluster { Failure::Unfit(wrong_scheme("redis")) } else { error.into() }
        })?;
        let main = waiting.swap_remove(0);
        let limit = self.options.response_timeout;
        let looked = timeout(limit, self.servers.look(&main, &self.options)).await;
        let (is_new, is_whole) = match looked.unwrap_or(Err(Failure::TimedOut)) {
            Ok(is_new) => (is_new, true),
            // One primary of a cluster may hang, or be gone: the others can do their part.
            Err(failure) if self.client.is_cluster() && failure.is_worth_repeating() => {
                (true, false)
            }
            Err(failure) => return Err(failure),
        };
        let runs_flags = timeout(limit, server::runs_flags(&main, &self.options.prefix)).await;
        let knows_flags = runs_flags.map_err(|_| Failure::TimedOut)?? && is_new;
        Ok(Arc::new(Live { main, waiting, knows_flags, is_doubted: (!is_whole).into() }))
    }

    /// Closes the connections. Every later call fails with [`Unavailable`](crate::StoreErrorKind::Unavailable).
    pub(super) fn close(&self) {
        *self.state() = State { is_closed: true, ..State::default() };
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Locks the state, in which the connections that have opened meanwhile are the current ones.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = state.opening.clone().and_then(FutureExt::now_or_never) {
            state.opening = None;
            match opened {
                Ok(live) if !live.is_doubted() || state.current.is_none() => {
                    state.current = Some(live);
                }
                Err(Failure::Unfit(_)) => state.current = None,
                _ => {}
            }
        }
        state
    }
}

async fn send_script(
    live: &Live,
    turn: usize,
    script: Cow<'_, Cmd>,
    wait: Option<(u32, Duration)>,
) -> Result<Value, Failure> {
    let Some((replicas, bound)) = wait else { return Ok(live.main.send(&script).await?) };
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.add_command(script.into_owned());
    pipeline.cmd("WAIT").arg(replicas).arg(u64::try_from(bound.as_millis()).unwrap_or(u64::MAX));
    let replies = live.waiting[turn % live.waiting.len()].send_all(&pipeline).await?;
    let mut replies = replies.into_iter();
    let reply = replies.next().unwrap_or(Value::Nil).extract_error()?;
    match replies.next() {
        Some(Value::Int(have)) if have >= i64::from(replicas) => Ok(reply),
        _ => Err(Failure::TooFewReplicas),
    }
}

/// What was sent over connections. If its caller goes away before the reply, the connections may be silent.
struct Sent<'a> {
    live: &'a Live,
    is_doubt: bool,
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        self.live.is_doubted.fetch_or(self.is_doubt, Ordering::Relaxed);
    }
}
