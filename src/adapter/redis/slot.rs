//! [`Slot`]: the open connections of an adapter, and the calls over them. Connections that are of no use any more are
//! replaced.
//!
//! `redis` connects again after an error of the socket only. A connection that is silent, and one to a server
//! that is no primary any more, stay as they are. So a slot replaces its connections after a reply that did not
//! come, after a call that was dropped before its reply, after an error of the socket, and after a refusal that
//! another server might not send.
//!
//! 1. One task opens connections for all callers. It goes on if a caller goes away.
//! 2. Connections that may still work serve until the next ones are open. A doubt of them stays until then. While it
//!    stays, calls begin an opening once within the response timeout.
//! 3. In a cluster, open connections are replaced only by ones that reach every primary. While a primary hangs, new
//!    ones would serve no other key better, and each of their calls there would hold up all others: `redis` looks
//!    for the slots again, and asks the silent primary too.
//! 4. A failed opening is believed for a moment, and never for good.
//! 5. A call is repeated within its time, because every script is idempotent by its token: a claim finds its own
//!    row, or another version than it names. If one attempt may have been executed, the outcome of the call is
//!    unknown.
//! 6. `WAIT` holds up everything behind it on its connection, and waits for the writes of its own connection
//!    only. So a call that waits for replicas is one script with its `WAIT`, on one of a few further connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use redis::{Cmd, Pipeline, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::client::{Connection, RedisClient};
use super::errors::{Doubt, Failure, is_unknown_script};
use super::options::RedisOptions;
use super::script::ScriptCall;
use super::server::{Servers, knows_flags, wrong_scheme};
use crate::error::Error;

/// How many calls wait for replicas at the same time.
const WAITING: usize = 8;
/// How long a failed opening is believed.
const FAILED: Duration = Duration::from_millis(100);
/// How long a server counts as one that may not be used.
const UNFIT: Duration = Duration::from_secs(1);
/// Sentinels take up to 1.5 s each to reply, which `redis` sets.
const SENTINELS: Duration = Duration::from_secs(5);

/// The pauses before a repetition.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// Open connections to the same servers.
struct Live {
    main: Connection,
    /// For the calls that wait for replicas.
    waiting: Vec<Connection>,
    /// Empty for a cluster.
    address: String,
    knows_flags: bool,
    /// Whether every primary has been looked at.
    is_whole: bool,
}

/// The connections of one adapter.
pub(super) struct Slot {
    pub(super) client: RedisClient,
    pub(super) options: RedisOptions,
    servers: Servers,
    state: Mutex<State>,
    /// The number of the next script, which chooses the connection of a call that waits for replicas.
    turn: AtomicUsize,
}

#[derive(Default)]
struct State {
    current: Option<Arc<Live>>,
    /// The current connections are to be replaced.
    is_doubted: bool,
    /// Closed with the end of the task that opens the next connections, also if its runtime ends.
    opening: Option<watch::Receiver<()>>,
    /// When the last opening began.
    began: Option<Instant>,
    /// The last opening, if it failed, and when it ended.
    failed: Option<(Failure, Instant)>,
    is_closed: bool,
}

impl State {
    fn opening(&self) -> Option<watch::Receiver<()>> {
        self.opening.as_ref().filter(|opening| opening.has_changed().is_ok()).cloned()
    }
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
        let servers = Servers::new(options.evictable, client.is_cluster());
        let (state, turn) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self { client, options, servers, state, turn })
    }

    /// Opens a connection, and checks the servers. Tries once.
    ///
    /// # Errors
    ///
    /// [`ConfigError`](crate::ConfigError) for a server that may not be used;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if none can be reached.
    pub(super) async fn connect(self: &Arc<Self>) -> Result<(), Error> {
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

    /// Runs a script on the primary of its key. A script that writes waits for replicas, if the options say so.
    pub(super) async fn run(
        self: &Arc<Self>,
        call: &ScriptCall,
        bound: Bound,
    ) -> Result<Value, Error> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let wait = self.options.wait_replicas.filter(|_| call.writes());
        let send = |live: Arc<Live>| async move {
            let waiting = wait.and_then(|_| live.waiting.get(turn % WAITING));
            run_script(&live, waiting.unwrap_or(&live.main), call, wait).await
        };
        self.repeat(bound, send).await
    }

    /// Sends a command without a key to the primary at `address`.
    pub(super) async fn ask(
        self: &Arc<Self>,
        address: &str,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Value, Error> {
        let send = |live: Arc<Live>| async move { Ok(live.main.ask(address, command).await?) };
        self.repeat(self.bound(context), send).await
    }

    /// Sends a command without a key to every primary. Returns the address and the reply of each.
    ///
    /// # Errors
    ///
    /// Those of the connection to any primary. A refusal is a reply.
    pub(super) async fn ask_all(
        self: &Arc<Self>,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Vec<(String, Result<Value, Error>)>, Error> {
        let send =
            |live: Arc<Live>| async move { Ok(live.main.ask_all(&live.address, command).await?) };
        let replies = self.repeat(self.bound(context), send).await?;
        let reply = |reply: RedisResult<Value>| {
            reply.map_err(|error| Failure::from(error).into_error(context))
        };
        Ok(replies.into_iter().map(|(address, it)| (address, reply(it))).collect())
    }

    /// Repeats `send` until it succeeds, fails for good, or the time of the call is up.
    async fn repeat<T, F>(
        self: &Arc<Self>,
        bound: Bound,
        send: impl Fn(Arc<Live>) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let mut pauses = None;
        let mut failed = None;
        // The last error after which the outcome is unknown: a later refusal does not change that.
        let mut unknown: Option<Error> = None;
        loop {
            let failure = match self.send(bound.deadline, &mut failed, &send).await {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            let pause = pauses.get_or_insert_with(pauses_of_a_call).next().unwrap_or(LONGEST_PAUSE);
            let is_last = bound.is_once
                || !failure.is_worth_repeating()
                || Instant::now() + pause >= bound.deadline;
            let error = match (unknown, failure.into_error(bound.context)) {
                (Some(unknown), error) if !error.is_unknown() => unknown,
                (_, error) => error,
            };
            if is_last {
                return Err(error);
            }
            unknown = error.is_unknown().then_some(error);
            sleep(pause).await;
        }
    }

    /// Sends something over the open connections, until `deadline` at most. `failed` are the connections if they have
    /// failed. A later attempt of the same call waits for others, if they are being opened.
    async fn send<T, F>(
        self: &Arc<Self>,
        deadline: Instant,
        failed: &mut Option<Arc<Live>>,
        send: impl FnOnce(Arc<Live>) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let live = self.live(failed.as_ref());
        let live = timeout_at(deadline, live).await.unwrap_or(Err(Failure::TimedOut))?;
        let until = deadline.min(Instant::now() + self.response_timeout());
        let mut unanswered = Unanswered { slot: self, live: &live, doubt: Some(Doubt::Silent) };
        let reply = timeout_at(until, send(Arc::clone(&live))).await;
        let reply = reply.unwrap_or(Err(Failure::TimedOut));
        unanswered.doubt = reply.as_ref().err().and_then(|failure| failure.doubt(&self.client));
        *failed = match unanswered.doubt {
            None | Some(Doubt::Moved) => None,
            Some(_) => Some(Arc::clone(&live)),
        };
        reply
    }

    /// Returns the open connections. Opens them, if there are none. Waits for the next ones, if `failed` are the
    /// current ones and are being replaced.
    async fn live(self: &Arc<Self>, failed: Option<&Arc<Live>>) -> Result<Arc<Live>, Failure> {
        let mut has_waited = false;
        loop {
            let mut opening = {
                let mut state = self.lock();
                if state.is_closed {
                    return Err(Failure::Closed);
                }
                let mut opening = state.opening();
                let rest = self.options.response_timeout;
                let is_due = state.is_doubted && state.began.is_none_or(|at| at.elapsed() >= rest);
                if is_due && opening.is_none() {
                    opening = Some(self.start(&mut state));
                }
                if let Some(live) = &state.current
                    && (opening.is_none() || failed.is_none_or(|failed| !Arc::ptr_eq(failed, live)))
                {
                    return Ok(Arc::clone(live));
                }
                match (opening, &state.failed) {
                    (Some(opening), _) => opening,
                    (None, Some((failure, at))) if has_waited || at.elapsed() < held(failure) => {
                        return Err(failure.clone());
                    }
                    (None, _) => self.start(&mut state),
                }
            };
            // Fails at the end of the task.
            let _ = opening.changed().await;
            has_waited = true;
        }
    }

    /// Closes the connections. Every later call fails with [`Unavailable`](crate::ErrorKind::Unavailable).
    pub(super) fn close(&self) {
        *self.lock() = State { is_closed: true, ..State::default() };
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Doubts connections, if they are the current ones.
    fn doubt(&self, live: &Arc<Live>, doubt: Doubt) {
        let mut state = self.lock();
        if state.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, live)) {
            match doubt {
                Doubt::Broken => state.current = None,
                Doubt::Silent | Doubt::Moved => state.is_doubted = true,
            }
        }
    }

    /// Starts the task that opens the next connections. It ends by itself, because it has a bound.
    fn start(self: &Arc<Self>, state: &mut State) -> watch::Receiver<()> {
        let (alive, opening) = watch::channel(());
        (state.began, state.failed) = (Some(Instant::now()), None);
        state.opening = Some(opening.clone());
        let slot = Arc::clone(self);
        tokio::spawn(async move {
            let bound =
                SENTINELS + 2 * (slot.options.connect_timeout + slot.options.response_timeout);
            let opened = timeout(bound, slot.open()).await;
            slot.take(opened.unwrap_or(Err(Failure::TimedOut)));
            drop(alive);
        });
        opening
    }

    fn take(&self, opened: Result<Live, Failure>) {
        let mut state = self.lock();
        state.opening = None;
        match opened {
            _ if state.is_closed => {}
            Ok(live) => {
                state.is_doubted = !live.is_whole;
                if live.is_whole || state.current.is_none() {
                    state.current = Some(Arc::new(live));
                }
            }
            Err(failure) => {
                if failure.is_unfit() {
                    state.current = None;
                }
                state.failed = Some((failure, Instant::now()));
            }
        }
    }

    /// Opens connections, and checks their servers.
    async fn open(&self) -> Result<Live, Failure> {
        let waiting = if self.options.wait_replicas.is_some() { WAITING } else { 0 };
        let (mut waiting, address) = match self.client.connect(&self.options, 1 + waiting).await {
            Err(error) if is_no_cluster(&error) => {
                return Err(Failure::Unfit(wrong_scheme("redis")));
            }
            opened => opened?,
        };
        let main = waiting.swap_remove(0);
        let (limit, keys) = (self.options.response_timeout, self.probe_keys());
        let (looked, knows_flags) = tokio::join!(
            timeout(limit, self.servers.look(&main, &address)),
            timeout(limit, knows_flags(&main, &keys)),
        );
        let looked = looked.unwrap_or(Err(Failure::TimedOut));
        let is_whole = looked.is_ok();
        let is_new = match looked {
            // In a cluster, one primary may hang: the others can do their part.
            Err(failure) if !self.client.is_cluster() || failure.is_unfit() => return Err(failure),
            looked => looked.unwrap_or(true),
        };
        let knows_flags = knows_flags.map_err(|_| Failure::TimedOut)?? && is_new;
        Ok(Live { main, waiting, address, knows_flags, is_whole })
    }

    /// Returns how long a command may take, with its wait for replicas.
    fn response_timeout(&self) -> Duration {
        let wait = self.options.wait_replicas.map_or(Duration::ZERO, |(_, bound)| bound);
        self.options.response_timeout + wait
    }

    /// Returns names of keys of ours that do not exist. Those in a cluster have three slots far apart.
    fn probe_keys(&self) -> Vec<Vec<u8>> {
        let keys = if self.client.is_cluster() { 3 } else { 1 };
        (0..keys).map(|key| format!("{}::{key}", self.options.prefix).into_bytes()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn pauses_of_a_call() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(FIRST_PAUSE)
        .with_max_delay(LONGEST_PAUSE)
        .with_jitter()
        .without_max_times()
        .build()
}

/// Runs a script by its hash; by its text, if the server does not know the hash.
async fn run_script(
    live: &Live,
    connection: &Connection,
    call: &ScriptCall,
    wait: Option<(u32, Duration)>,
) -> Result<Value, Failure> {
    let send = |is_by_hash| {
        send_script(
            connection,
            call.key.as_bytes(),
            call.command(live.knows_flags, is_by_hash),
            wait,
        )
    };
    match send(true).await {
        Err(Failure::Redis(error)) if is_unknown_script(&error) => send(false).await,
        reply => reply,
    }
}

async fn send_script(
    connection: &Connection,
    key: &[u8],
    script: Cmd,
    wait: Option<(u32, Duration)>,
) -> Result<Value, Failure> {
    let Some((replicas, bound)) = wait else {
        return Ok(connection.send(key, &script).await?);
    };
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.add_command(script);
    pipeline.cmd("WAIT").arg(replicas).arg(u64::try_from(bound.as_millis()).unwrap_or(u64::MAX));
    let mut replies = connection.send_all(key, pipeline).await?.into_iter();
    let reply = replies.next().unwrap_or(Value::Nil).extract_error()?;
    match replies.next() {
        Some(Value::Int(have)) if have >= i64::from(replicas) => Ok(reply),
        _ => Err(Failure::TooFewReplicas),
    }
}

fn held(failure: &Failure) -> Duration {
    if failure.is_unfit() { UNFIT } else { FAILED }
}

fn is_no_cluster(error: &redis::RedisError) -> bool {
    error.to_string().contains("cluster support disabled")
}

/// A command without a reply. If its caller goes away, the connection may be silent.
struct Unanswered<'a> {
    slot: &'a Slot,
    live: &'a Arc<Live>,
    doubt: Option<Doubt>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(doubt) = self.doubt {
            self.slot.doubt(self.live, doubt);
        }
    }
}
