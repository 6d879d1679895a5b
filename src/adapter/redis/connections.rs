//! [`Connections`]: the calls to the servers of one adapter.
//!
//! 1. A call is repeated within its time, because every script is idempotent by its token: a claim finds its own
//!    row, or another version than it names. If one attempt may have been executed, the outcome of the call is
//!    unknown.
//! 2. `WAIT` holds up everything behind it on its connection, and waits for the writes of its own connection
//!    only. So a call that waits for replicas is one script with its `WAIT`, on one of a few further connections.
//! 3. In a cluster, the primaries are looked at again after a call has failed, once calls succeed again.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, sleep, timeout};

use super::client::RedisClient;
use super::errors::{Doubt, Failure, is_unknown_script};
use super::options::RedisOptions;
use super::script::ScriptCall;
use super::server::Servers;
use super::slot::{Live, Opener, Slot};
use crate::error::Error;

/// The pauses before a repetition.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How many calls wait for replicas at the same time.
const WAITING: usize = 8;
/// How often the primaries of a cluster are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The connections of one adapter.
pub(super) struct Connections {
    opener: Arc<Opener>,
    main: Arc<Slot>,
    /// For the calls that wait for replicas.
    waiting: Vec<Arc<Slot>>,
    turn: AtomicUsize,
    /// A call has failed since the last look, and may have met a failover.
    has_failed: Arc<AtomicBool>,
    looked: Mutex<Option<Instant>>,
}

/// What bounds the attempts of a call.
#[derive(Clone, Copy)]
pub(super) struct Bound {
    pub(super) deadline: Instant,
    /// The call may be sent once.
    pub(super) is_once: bool,
}

impl Connections {
    pub(super) fn new(client: RedisClient, options: &RedisOptions) -> Self {
        let servers = Servers::new(options.evictable, client.is_cluster());
        let opener = Arc::new(Opener { client, options: options.clone(), servers });
        let waiting = if options.wait_replicas.is_some() { WAITING } else { 0 };
        Self {
            main: Slot::new(&opener),
            waiting: (0..waiting).map(|_| Slot::new(&opener)).collect(),
            opener,
            turn: AtomicUsize::new(0),
            has_failed: Arc::default(),
            looked: Mutex::default(),
        }
    }

    /// Opens a connection, and checks the servers. Tries once.
    ///
    /// # Errors
    ///
    /// [`ConfigError`](crate::ConfigError) for a server that may not be used;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if none can be reached.
    pub(super) async fn connect(&self) -> Result<(), Error> {
        match self.main.live(None).await {
            Ok(_) => Ok(()),
            Err(Failure::Unfit(fault)) => Err(fault.into()),
            Err(failure) => Err(failure.into_error("connecting to Redis")),
        }
    }

    /// Returns the bound of a call that begins now.
    pub(super) fn bound(&self) -> Bound {
        Bound { deadline: Instant::now() + self.opener.options.call_timeout, is_once: false }
    }

    /// Returns `true` if `redis` repeats a command whose reply was lost.
    pub(super) fn repeats_commands(&self) -> bool {
        self.opener.client.is_cluster()
    }

    /// Runs a script on the primary of its key. Waits for replicas, if the options say so.
    pub(super) async fn run(
        &self,
        call: &ScriptCall,
        context: &'static str,
        bound: Bound,
    ) -> Result<Value, Error> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let Some(slot) = self.waiting.get(turn % WAITING) else {
            return self.read(call, context, bound).await;
        };
        let wait = self.opener.options.wait_replicas;
        self.repeat(slot, call.key(), context, bound, |live| run_script(live, call, wait)).await
    }

    /// Runs a script as [`run`](Self::run) does, and never waits for replicas.
    pub(super) async fn read(
        &self,
        call: &ScriptCall,
        context: &'static str,
        bound: Bound,
    ) -> Result<Value, Error> {
        let send = |live| run_script(live, call, None);
        self.repeat(&self.main, call.key(), context, bound, send).await
    }

    /// Sends a command over one key to the primary of the key.
    pub(super) async fn send(
        &self,
        key: &[u8],
        command: &Cmd,
        context: &'static str,
    ) -> Result<Value, Error> {
        let send = |live: Arc<Live>| async move { Ok(live.connection.send(key, command).await?) };
        self.repeat(&self.main, key, context, self.bound(), send).await
    }

    /// Sends a command without a key to one primary.
    pub(super) async fn ask(
        &self,
        address: &str,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Value, Error> {
        let send =
            |live: Arc<Live>| async move { Ok(live.connection.ask(address, command).await?) };
        self.repeat(&self.main, &[], context, self.bound(), send).await
    }

    /// Sends a command without a key to every primary. Returns the address and the reply of each.
    ///
    /// # Errors
    ///
    /// Those of the connection to any primary. A refusal is a reply.
    pub(super) async fn ask_all(
        &self,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Vec<(String, Result<Value, Error>)>, Error> {
        let send = |live: Arc<Live>| async move {
            Ok(live.connection.ask_all(&live.address, command).await?)
        };
        let replies = self.repeat(&self.main, &[], context, self.bound(), send).await?;
        let reply = |reply: redis::RedisResult<Value>| {
            reply.map_err(|error| Failure::from(error).into_error(context))
        };
        Ok(replies.into_iter().map(|(address, it)| (address, reply(it))).collect())
    }

    /// Drops the connections. Every later call fails with [`Unavailable`](crate::ErrorKind::Unavailable).
    pub(super) fn close(&self) {
        self.slots().for_each(Slot::close);
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        std::iter::once(&self.main).chain(&self.waiting).map(AsRef::as_ref)
    }

    /// Repeats `send` until it succeeds, fails for good, or the time of the call is up.
    async fn repeat<T, F>(
        &self,
        slot: &Arc<Slot>,
        key: &[u8],
        context: &'static str,
        bound: Bound,
        send: impl Fn(Arc<Live>) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let mut pauses = None;
        let mut failed = None;
        // The first error after which the outcome is unknown: a later refusal does not change that.
        let mut unknown: Option<Error> = None;
        loop {
            let times = (self.opener.response_timeout(), bound.deadline);
            let failure = match slot.send(key, times, &mut failed, &send).await {
                Ok(reply) => {
                    self.look_after_failures();
                    return Ok(reply);
                }
                Err(failure) => failure,
            };
            self.note(&failure, key);
            let pause = pauses.get_or_insert_with(pauses_of_a_call).next().unwrap_or(LONGEST_PAUSE);
            let is_last = bound.is_once
                || !failure.is_worth_repeating()
                || Instant::now() + pause >= bound.deadline;
            let error = failure.into_error(context);
            if is_last {
                return Err(match unknown {
                    Some(unknown) if !error.is_unknown() => unknown,
                    _ => error,
                });
            }
            if error.is_unknown() && unknown.is_none() {
                unknown = Some(error);
            }
            sleep(pause).await;
        }
    }

    fn note(&self, failure: &Failure, key: &[u8]) {
        if failure.is_worth_repeating() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        // The other connections lead to the same server.
        if let Some(doubt @ Doubt::Alone) = failure.doubt() {
            self.slots().for_each(|slot| slot.doubt(key, doubt));
        }
    }

    /// Rule 3. Outside of a cluster, the connection that opens looks.
    fn look_after_failures(&self) {
        if !self.has_failed.load(Ordering::Relaxed) || !self.opener.client.is_cluster() {
            return;
        }
        {
            let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
            if looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
                return;
            }
            *looked = Some(Instant::now());
        }
        self.has_failed.store(false, Ordering::Relaxed);
        let (opener, main) = (Arc::clone(&self.opener), Arc::clone(&self.main));
        let has_failed = Arc::clone(&self.has_failed);
        tokio::spawn(async move {
            let look = async { opener.servers.look(&main.live(None).await?.connection, "").await };
            match timeout(opener.response_timeout(), look).await {
                Ok(Ok(())) => {}
                Ok(Err(fault @ Failure::Unfit(_))) => main.refuse(fault),
                _ => has_failed.store(true, Ordering::Relaxed),
            }
        });
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
    live: Arc<Live>,
    call: &ScriptCall,
    wait: Option<(u32, Duration)>,
) -> Result<Value, Failure> {
    let knows_flags = live.knows_flags;
    match send_script(&live, call.key(), call.by_hash(knows_flags), wait).await {
        Err(Failure::Redis(error)) if is_unknown_script(&error) => {
            send_script(&live, call.key(), call.by_text(knows_flags), wait).await
        }
        reply => reply,
    }
}

async fn send_script(
    live: &Live,
    key: &[u8],
    script: Cmd,
    wait: Option<(u32, Duration)>,
) -> Result<Value, Failure> {
    let Some((replicas, bound)) = wait else {
        return Ok(live.connection.send(key, &script).await?);
    };
    let mut pipeline = Pipeline::with_capacity(2);
    pipeline.add_command(script);
    pipeline.cmd("WAIT").arg(replicas).arg(u64::try_from(bound.as_millis()).unwrap_or(u64::MAX));
    let mut replies = live.connection.send_all(key, pipeline).await?.into_iter();
    let reply = replies.next().unwrap_or(Value::Nil).extract_error()?;
    match replies.next() {
        Some(Value::Int(have)) if have >= i64::from(replicas) => Ok(reply),
        _ => Err(Failure::TooFewReplicas),
    }
}
