//! [`Slot`]: one connection, which is replaced when it is of no use any more.
//!
//! `redis` connects again after an error of the socket only. A connection that is silent, and one to a server
//! that is no primary any more, stay as they are. So a slot replaces its connection after a reply that did not
//! come, after a call that was dropped before its reply, after an error of the socket, and after a refusal that a
//! replica sends.
//!
//! 1. One task opens a connection for all callers. It goes on if a caller goes away.
//! 2. A connection that may still work is replaced once within the response timeout, and serves meanwhile.
//! 3. In a cluster, a new connection is taken only if it reaches the primary that did not reply. While that primary
//!    hangs, the new one would serve no other key better, and each of its calls there would hold up all others:
//!    `redis` looks for the slots again, and asks the silent primary too.
//! 4. A failed opening is believed for a moment, and never for good.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use tokio::time::{Instant, timeout, timeout_at};

use super::client::{Connection, RedisClient};
use super::errors::{Doubt, Failure};
use super::options::RedisOptions;
use super::server::{Servers, knows_flags};
use crate::error::ConfigError;

/// How long a failed opening is believed.
const FAILED: Duration = Duration::from_millis(100);
/// How long a server counts as one that may not be used.
const UNFIT: Duration = Duration::from_secs(1);
/// Sentinels take up to 1.5 s each to reply, which `redis` sets.
const SENTINELS: Duration = Duration::from_secs(5);

/// What a slot needs to open a connection. The slots of an adapter share it.
pub(super) struct Opener {
    pub(super) client: RedisClient,
    pub(super) options: RedisOptions,
    pub(super) servers: Servers,
}

/// An open connection.
pub(super) struct Live {
    pub(super) connection: Connection,
    /// Empty for a cluster.
    pub(super) address: String,
    pub(super) knows_flags: bool,
    opened: Instant,
}

/// A place for one connection.
pub(super) struct Slot {
    opener: Arc<Opener>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    current: Option<Arc<Live>>,
    /// Set if the current connection is to be replaced: the key of the call that failed.
    doubted: Option<Vec<u8>>,
    opening: Option<Opening>,
    /// When the last opening began.
    began: Option<Instant>,
    /// The last opening, if it failed, and when it ended.
    failed: Option<(Failure, Instant)>,
    is_closed: bool,
}

type Opening = Shared<BoxFuture<'static, Result<Arc<Live>, Failure>>>;

impl Slot {
    pub(super) fn new(opener: &Arc<Opener>) -> Arc<Self> {
        Arc::new(Self { opener: Arc::clone(opener), state: Mutex::default() })
    }

    /// Sends something over the open connection, until `deadline` at most. On failure, `failed` is the connection.
    /// A later attempt of the same call waits for another one, if one is being opened.
    pub(super) async fn send<T, F>(
        self: &Arc<Self>,
        key: &[u8],
        (response_timeout, deadline): (Duration, Instant),
        failed: &mut Option<Arc<Live>>,
        send: impl FnOnce(Arc<Live>) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let live = self.live(failed.as_ref());
        let live = timeout_at(deadline, live).await.unwrap_or(Err(Failure::TimedOut))?;
        let until = deadline.min(Instant::now() + response_timeout);
        let mut unanswered =
            Unanswered { slot: self, live: &live, key, doubt: Some(Doubt::Silent) };
        let reply = timeout_at(until, send(Arc::clone(&live))).await;
        let reply = reply.unwrap_or(Err(Failure::TimedOut));
        unanswered.doubt = reply.as_ref().err().and_then(Failure::doubt);
        drop(unanswered);
        if reply.is_err() {
            *failed = Some(live);
        }
        reply
    }

    /// Returns the open connection. Opens it, if there is none. Waits for the next one, if `failed` is the current
    /// one and is being replaced.
    pub(super) async fn live(
        self: &Arc<Self>,
        failed: Option<&Arc<Live>>,
    ) -> Result<Arc<Live>, Failure> {
        let opening = {
            let mut state = self.lock();
            if state.is_closed {
                return Err(Failure::Closed);
            }
            if let Some(key) = state.doubted.take()
                && state.opening.is_none()
            {
                // A command without a key has the rights to none.
                let keys = if key.is_empty() { self.opener.probe_keys() } else { vec![key] };
                drop(self.start(&mut state, keys));
            }
            if let Some(live) = &state.current
                && (state.opening.is_none()
                    || failed.is_none_or(|failed| !Arc::ptr_eq(failed, live)))
            {
                return Ok(Arc::clone(live));
            }
            match (&state.opening, &state.failed) {
                (None, Some((failure, at))) if at.elapsed() < held(failure) => {
                    return Err(failure.clone());
                }
                (None, _) => self.start(&mut state, self.opener.probe_keys()),
                (Some(opening), _) => opening.clone(),
            }
        };
        let opened = opening.clone().await;
        if matches!(opened, Err(Failure::Interrupted)) {
            let mut state = self.lock();
            if state.opening.as_ref().is_some_and(|other| other.ptr_eq(&opening)) {
                state.opening = None;
            }
        }
        opened
    }

    /// Closes the connection, for good.
    pub(super) fn close(&self) {
        *self.lock() = State { is_closed: true, ..State::default() };
    }

    /// Doubts the current connection, whichever it is.
    pub(super) fn doubt(&self, key: &[u8], doubt: Doubt) {
        let current = self.lock().current.clone();
        if let Some(live) = current {
            self.replace(&live, key, doubt);
        }
    }

    /// Refuses calls for a moment, because a server may not be used.
    pub(super) fn refuse(&self, fault: Failure) {
        let mut state = self.lock();
        state.current = None;
        state.failed = Some((fault, Instant::now()));
    }

    /// Replaces the current connection, if it is this one and the doubt calls for it.
    fn replace(&self, live: &Arc<Live>, key: &[u8], doubt: Doubt) {
        let client = &self.opener.client;
        let is_moot = match doubt {
            Doubt::Broken | Doubt::Silent => false,
            // `redis` looks for the slots again.
            Doubt::Demoted => client.is_cluster(),
            // Only Sentinels know of another primary.
            Doubt::Alone => !client.is_sentinel(),
        };
        let mut state = self.lock();
        let is_current = state.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, live));
        if is_moot || !is_current {
            return;
        }
        if doubt == Doubt::Broken && !client.is_cluster() {
            state.current = None;
            return;
        }
        let rest = self.opener.options.response_timeout;
        let is_recent = |at: Instant| at.elapsed() < rest;
        if !is_recent(live.opened) && !state.began.is_some_and(is_recent) {
            state.doubted = Some(key.to_vec());
        }
    }

    /// Starts the task that opens the next connection.
    fn start(self: &Arc<Self>, state: &mut State, probe_keys: Vec<Vec<u8>>) -> Opening {
        state.began = Some(Instant::now());
        let task = tokio::spawn(Arc::clone(self).open(probe_keys));
        let opening = async move { task.await.unwrap_or(Err(Failure::Interrupted)) };
        let opening = opening.boxed().shared();
        state.opening = Some(opening.clone());
        opening
    }

    /// Ends by itself, because it has a bound.
    async fn open(self: Arc<Self>, probe_keys: Vec<Vec<u8>>) -> Result<Arc<Live>, Failure> {
        let opened = timeout(self.opener.bound(), self.opener.open(&probe_keys)).await;
        let opened = opened.unwrap_or(Err(Failure::TimedOut)).map(Arc::new);
        let mut state = self.lock();
        state.opening = None;
        if state.is_closed {
            return Err(Failure::Closed);
        }
        match &opened {
            Ok(live) => state.current = Some(Arc::clone(live)),
            Err(failure) => {
                if matches!(failure, Failure::Unfit(_)) {
                    state.current = None;
                }
                state.failed = Some((failure.clone(), Instant::now()));
            }
        }
        opened
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn held(failure: &Failure) -> Duration {
    if matches!(failure, Failure::Unfit(_)) { UNFIT } else { FAILED }
}

impl Opener {
    /// Opens a connection, and checks its servers.
    async fn open(&self, probe_keys: &[Vec<u8>]) -> Result<Live, Failure> {
        let (connection, address) = match self.client.connect(&self.options).await {
            Err(error) if is_no_cluster(&error) => {
                return Err(Failure::Unfit(ConfigError::WrongRedisScheme { scheme: "redis" }));
            }
            opened => opened?,
        };
        let limit = self.options.response_timeout;
        let (looked, knows_flags) = tokio::join!(
            timeout(limit, self.servers.look(&connection, &address)),
            timeout(limit, knows_flags(&connection, probe_keys)),
        );
        match looked.unwrap_or(Err(Failure::TimedOut)) {
            Err(failure @ Failure::Unfit(_)) => return Err(failure),
            // In a cluster, one primary may hang: the others can do their part.
            Err(failure) if !self.client.is_cluster() => return Err(failure),
            _ => {}
        }
        let knows_flags = knows_flags.map_err(|_| Failure::TimedOut)??;
        Ok(Live { connection, address, knows_flags, opened: Instant::now() })
    }

    /// Returns how long a command may take, with its wait for replicas.
    pub(super) fn response_timeout(&self) -> Duration {
        let wait = self.options.wait_replicas.map_or(Duration::ZERO, |(_, bound)| bound);
        self.options.response_timeout + wait
    }

    fn bound(&self) -> Duration {
        SENTINELS + 2 * (self.options.connect_timeout + self.options.response_timeout)
    }

    /// Returns names of keys of ours that do not exist. Those in a cluster have three slots far apart.
    fn probe_keys(&self) -> Vec<Vec<u8>> {
        let keys = if self.client.is_cluster() { 3 } else { 1 };
        (0..keys).map(|key| format!("{}::{key}", self.options.prefix).into_bytes()).collect()
    }
}

fn is_no_cluster(error: &redis::RedisError) -> bool {
    error.to_string().contains("cluster support disabled")
}

/// A command without a reply. If its caller goes away, the connection may be silent.
struct Unanswered<'a> {
    slot: &'a Slot,
    live: &'a Arc<Live>,
    key: &'a [u8],
    doubt: Option<Doubt>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(doubt) = self.doubt {
            self.slot.replace(self.live, self.key, doubt);
        }
    }
}
