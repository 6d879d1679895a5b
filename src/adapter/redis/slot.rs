//! [`Slot`]: the open connections of an adapter, and the calls over them.
//!
//! `redis` connects again after an error of the socket only. A connection that is silent, and one
//! to a server that is no primary any more, stay as they are. So connections are in *doubt* after a
//! reply that did not come, after a call that was dropped before its reply, after an error of the
//! socket, and after a refusal that another server might not send. Connections in doubt are
//! replaced.
//!
//! 1. One task opens the next connections for all callers. It continues if a caller is dropped.
//! 2. A repetition does not use connections in doubt: it waits for the next ones. First attempts
//!    use them, because in a cluster the other primaries still reply.
//! 3. In a cluster, open connections are replaced only by ones that reach every primary. While a
//!    primary hangs, new ones would serve no other key better, and each of their calls there would
//!    hold up all others: `redis` looks for the slots again, and asks the silent primary too. A
//!    connection to another node that becomes silent meanwhile stays until the kernel ends it: see
//!    `UNACKNOWLEDGED`.
//! 4. A call is repeated within its time, because every script is idempotent by its token: a claim
//!    finds its own row, or another version than it names. If one attempt may have been executed,
//!    the outcome of the call is unknown.
//! 5. `WAIT` delays every command behind it on its connection, and waits only for the writes of its
//!    own connection. So a call that waits for replicas is one script with its `WAIT`, on one of a
//!    few further connections.

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
    /// For the calls that wait for replicas, by turns.
    waiting: Vec<Connection>,
    turn: AtomicUsize,
    /// The next connections replace these. Set from the beginning if not every primary has been
    /// looked at.
    is_doubted: AtomicBool,
}

impl Live {
    fn is_doubted(&self) -> bool {
        self.is_doubted.load(Ordering::Relaxed)
    }

    async fn run(&self, script: &Cmd, wait: Option<(u32, Duration)>) -> Result<Value, Failure> {
        let Some((replicas, bound)) = wait else { return Ok(self.main.send(script).await?) };
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline.add_command(script.clone());
        let bound = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
        pipeline.cmd("WAIT").arg(replicas).arg(bound);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.waiting.len();
        let mut replies = self.waiting[turn].send_all(&pipeline).await?.into_iter();
        let reply = replies.next().unwrap_or(Value::Nil).extract_error()?;
        match replies.next() {
            Some(Value::Int(have)) if have >= i64::from(replicas) => Ok(reply),
            _ => Err(Failure::TooFewReplicas),
        }
    }
}

type Opening = Shared<BoxFuture<'static, Result<Arc<Live>, Failure>>>;

/// The connections of one adapter.
pub(super) struct Slot {
    pub(super) client: RedisClient,
    pub(super) options: RedisOptions,
    /// An option is not valid: every call fails.
    fault: Option<StoreError>,
    servers: Servers,
    state: Mutex<Connecting>,
}

#[derive(Default)]
struct Connecting {
    current: Option<Arc<Live>>,
    /// The next connections, while they open.
    opening: Option<Opening>,
    /// When the last opening began.
    began: Option<Instant>,
    is_closed: bool,
}

/// The time limits of the attempts of a call.
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
        let (servers, state) = (Servers::default(), Mutex::default());
        let fault = options.check().err().map(StoreError::from);
        Arc::new(Self { client, options, fault, servers, state })
    }

    /// Returns the bound of a call that begins now.
    pub(super) fn bound(&self, context: &'static str) -> Bound {
        Bound { context, deadline: Instant::now() + self.options.call_timeout, is_once: false }
    }

    /// Runs a script on the primary of its key, by its hash; by its text, if the server does not
    /// know the hash. A script that writes waits for replicas, if the options say so.
    pub(super) async fn run(
        self: &Arc<Self>,
        call: &ScriptCall,
        bound: Bound,
    ) -> Result<Value, StoreError> {
        let wait = self.options.wait_replicas.filter(|_| call.writes());
        let send = |live: Arc<Live>| async move {
            match live.run(&call.command, wait).await {
                Err(failure) if failure.is_unknown_script() => {
                    live.run(&call.by_text(), wait).await
                }
                reply => reply,
            }
        };
        self.repeat(bound, send).await
    }

    /// Sends something over the open connections, until that succeeds, fails for good, or the time
    /// of the call is up.
    pub(super) async fn repeat<T, F>(
        self: &Arc<Self>,
        bound: Bound,
        send: impl Fn(Arc<Live>) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let (mut pause, mut before) = (FIRST_PAUSE, None::<StoreError>);
        loop {
            let attempt = async {
                let live = timeout_at(bound.deadline, self.live(before.is_some())).await;
                let live = live.unwrap_or(Err(Failure::Unsent))?;
                let until = bound.deadline.min(Instant::now() + self.options.reply_timeout());
                let mut sent = SentScript { live: &live, is_doubt: true };
                let reply = timeout_at(until, send(Arc::clone(&live))).await;
                let reply = reply.unwrap_or(Err(Failure::TimedOut));
                sent.is_doubt = reply.as_ref().is_err_and(|failure| failure.is_doubt(&self.client));
                reply
            };
            let failure = match attempt.await {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            let is_last = bound.is_once
                || !failure.is_worth_repeating()
                || Instant::now() + pause >= bound.deadline;
            // After an error with an unknown outcome, a refusal does not make the outcome known.
            // After a refusal, a wait for another connection leaves it known.
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

    /// Returns the open connections. Opens the next ones, if there are none, or if these are in
    /// doubt: then a call that is repeated waits for the next ones.
    pub(super) async fn live(self: &Arc<Self>, is_repeated: bool) -> Result<Arc<Live>, Failure> {
        let opening = {
            let mut state = self.state();
            let doubted = match &state.current {
                _ if state.is_closed => return Err(Failure::Closed),
                Some(live) if !live.is_doubted() => return Ok(Arc::clone(live)),
                doubted => doubted.clone(),
            };
            let opening = self.opening(&mut state);
            match doubted.filter(|_| !is_repeated) {
                Some(live) => return Ok(live),
                None => opening,
            }
        };
        opening.await
    }

    /// Returns the opening that is under way. Otherwise starts the task of another one.
    fn opening(self: &Arc<Self>, state: &mut Connecting) -> Opening {
        // One that is here and over has ended with its runtime.
        let under_way = state.opening.take().filter(|it| it.clone().now_or_never().is_none());
        let opening = under_way.unwrap_or_else(|| {
            let now = Instant::now();
            let begins = state.began.map_or(now, |began| now.max(began + OPENING_PAUSE));
            state.began = Some(begins);
            let slot = Arc::clone(self);
            let task = tokio::spawn(async move {
                sleep_until(begins).await;
                let opened = slot.open().await;
                slot.install(opened)
            });
            task.map(|opened| opened.unwrap_or(Err(Failure::TimedOut))).boxed().shared()
        });
        state.opening.insert(opening).clone()
    }

    /// Opens connections, and checks their servers.
    async fn open(&self) -> Result<Live, Failure> {
        let limit = self.options.response_timeout;
        let connected = SENTINELS + 2 * self.options.connect_timeout;
        let count = self.options.wait_replicas.map_or(1, |_| 1 + WAITING);
        let connecting = timeout(connected, self.client.connect(&self.options, count));
        let mut waiting = connecting.await?.map_err(|error| {
            let is_no_cluster = error.to_string().contains("cluster support disabled");
            if is_no_cluster { Failure::Unfit(wrong_scheme("redis")) } else { error.into() }
        })?;
        let main = waiting.swap_remove(0);
        let looked = timeout(limit, self.servers.look(&main, &self.options)).await;
        let is_whole = match looked.unwrap_or(Err(Failure::TimedOut)) {
            Ok(()) => true,
            // One primary of a cluster may hang, or be gone: the others can do their part.
            Err(failure) if self.client.is_cluster() && failure.is_worth_repeating() => false,
            Err(failure) => return Err(failure),
        };
        timeout(limit, server::runs_scripts(&main, &self.options.prefix)).await??;
        Ok(Live { main, waiting, turn: AtomicUsize::new(0), is_doubted: (!is_whole).into() })
    }

    /// Ends an opening. Returns the connections that are the current ones then.
    fn install(&self, opened: Result<Live, Failure>) -> Result<Arc<Live>, Failure> {
        let mut state = self.state();
        state.opening = None;
        match (opened, &state.current) {
            _ if state.is_closed => Err(Failure::Closed),
            (Ok(opened), Some(current)) if opened.is_doubted() => Ok(Arc::clone(current)),
            (Ok(opened), _) => Ok(Arc::clone(state.current.insert(Arc::new(opened)))),
            (Err(failure), _) => {
                if matches!(failure, Failure::Unfit(_)) {
                    state.current = None;
                }
                Err(failure)
            }
        }
    }

    /// Closes the connections. Every later call fails with
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable).
    pub(super) fn close(&self) {
        *self.state() = Connecting { is_closed: true, ..Connecting::default() };
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    fn state(&self) -> MutexGuard<'_, Connecting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A script that was sent over connections. If its caller is dropped before the reply, the
/// connections may be silent.
struct SentScript<'a> {
    live: &'a Live,
    is_doubt: bool,
}

impl Drop for SentScript<'_> {
    fn drop(&mut self) {
        self.live.is_doubted.fetch_or(self.is_doubt, Ordering::Relaxed);
    }
}
