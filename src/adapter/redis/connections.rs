//! The calls to the servers of one adapter, over its [`Slot`].
//!
//! 1. A call is repeated within its time, because every script is idempotent by its token: a claim finds its own
//!    row, or another version than it names. If one attempt may have been executed, the outcome of the call is
//!    unknown.
//! 2. `WAIT` holds up everything behind it on its connection, and waits for the writes of its own connection
//!    only. So a call that waits for replicas is one script with its `WAIT`, on one of a few further connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, sleep};

use super::client::Connection;
use super::errors::{Failure, is_unknown_script};
use super::script::ScriptCall;
use super::slot::{Live, Slot};
use crate::error::Error;

/// The pauses before a repetition.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

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

    /// Runs a script on the primary of its key. Waits for replicas, if the options say so.
    pub(super) async fn run(
        self: &Arc<Self>,
        call: &ScriptCall,
        bound: Bound,
    ) -> Result<Value, Error> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let wait = self.options.wait_replicas;
        let send = |live: Arc<Live>| async move {
            let connection = if wait.is_some() { live.waiting(turn) } else { &live.main };
            run_script(&live, connection, call, wait).await
        };
        self.repeat(bound, send).await
    }

    /// Runs a script as [`run`](Self::run) does, and never waits for replicas.
    pub(super) async fn read(
        self: &Arc<Self>,
        call: &ScriptCall,
        bound: Bound,
    ) -> Result<Value, Error> {
        let send = |live: Arc<Live>| async move { run_script(&live, &live.main, call, None).await };
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
        let reply = |reply: redis::RedisResult<Value>| {
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
    let knows_flags = live.knows_flags;
    match send_script(connection, &call.key, call.by_hash(knows_flags), wait).await {
        Err(Failure::Redis(error)) if is_unknown_script(&error) => {
            send_script(connection, &call.key, call.by_text(knows_flags), wait).await
        }
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
