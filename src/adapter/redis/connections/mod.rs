//! [`Connections`]: the connections to one server, to the master that Sentinel names, or to a cluster.
//!
//! 1. One task at a time opens a connection. All callers wait for it, each within its own time.
//! 2. A connection is dropped after an error of the connection, and after a reply that did not come in
//!    time. A silent connection costs one call, not the process.
//! 3. A call is repeated within [`RedisOptions::call_timeout`], because every script is idempotent by its
//!    token. If one attempt may have been executed, the outcome of the call is unknown.
//! 4. Every server is asked at every connection whether it may be used.

mod failure;
mod fitness;
mod link;
mod sentinel;
mod single;
mod target;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use redis::aio::MultiplexedConnection;
use redis::cluster_async::ClusterConnection;
use redis::{Cmd, RedisConnectionInfo, Value};
use tokio::time::{Instant, sleep, timeout_at};

use self::failure::Failure;
use self::link::{Link, Target};
use self::sentinel::Sentinel;
use super::options::RedisOptions;
use super::script::ScriptCall;
use super::url::{Endpoint, Kind};
use crate::error::Error;

/// The pauses before a repetition.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A connection of yours.
#[derive(Clone)]
pub struct RedisConnection(Own);

#[derive(Clone)]
enum Own {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl From<MultiplexedConnection> for RedisConnection {
    fn from(connection: MultiplexedConnection) -> Self {
        Self(Own::Server(connection))
    }
}

impl From<ClusterConnection> for RedisConnection {
    fn from(connection: ClusterConnection) -> Self {
        Self(Own::Cluster(connection))
    }
}

/// A primary, as the topology names it now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Primary {
    /// `host:port`.
    pub(super) address: String,
}

/// The connections of one adapter.
pub(super) struct Connections {
    link: Arc<Link>,
    call_timeout: Duration,
}

impl Connections {
    /// Reads a URL. Connects to nothing.
    ///
    /// # Errors
    ///
    /// [`ConfigError`](crate::ConfigError) for a URL that cannot be read.
    pub(super) fn from_url(url: &str, options: &RedisOptions) -> Result<Self, Error> {
        options.checked()?;
        let endpoint = Endpoint::read(url)?;
        let mut redis = RedisConnectionInfo::default().set_db(endpoint.database);
        if let Some(username) = &endpoint.username {
            redis = redis.set_username(username);
        }
        if let Some(password) = &endpoint.password {
            redis = redis.set_password(password);
        }
        let target = match endpoint.kind {
            Kind::Server | Kind::Cluster => {
                let address = endpoint.addresses[0].clone();
                let client = target::client(&address, endpoint.tls, redis, options)?;
                Target::Server { client, address, in_cluster: false }
            }
            Kind::Sentinel => Target::Sentinel(Sentinel::new(&endpoint, redis, options)?),
        };
        let link = Link::new(target, options, Duration::ZERO);
        Ok(Self { link, call_timeout: options.call_timeout })
    }

    /// Connects, and checks the server. Tries once.
    ///
    /// # Errors
    ///
    /// [`ConfigError`](crate::ConfigError) for a server that may not be used;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if it cannot be reached.
    pub(super) async fn connect(&self) -> Result<(), Error> {
        let context = "connecting to Redis";
        let live = self.link.live().await.map_err(|failure| failure.into_error(context))?;
        live.fault().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Runs a script on the primary that holds its key.
    ///
    /// A call whose outcome is unknown is repeated within a bound, because every script is idempotent.
    pub(super) async fn run(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.repeat(context, || self.link.run(call, false)).await
    }

    /// Runs a script as [`run`](Self::run) does, and returns once a replica has its writes, if the
    /// primary has replicas.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable), with an unknown outcome, if too few replicas reply in time.
    pub(super) async fn run_durably(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.run(call, context).await
    }

    /// Returns the primaries of the topology.
    pub(super) async fn primaries(&self) -> Result<Vec<Primary>, Error> {
        let context = "finding the primaries";
        let address = match self.link.address() {
            Some(address) => address,
            None => {
                self.repeat(context, || self.link.live()).await?;
                self.link.address().ok_or_else(|| Failure::Interrupted.into_error(context))?
            }
        };
        Ok(vec![Primary { address: address.to_string() }])
    }

    /// Sends a command without a key to one primary.
    pub(super) async fn ask(
        &self,
        _primary: &Primary,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.repeat(context, || self.link.send(command, false)).await
    }

    /// Sends a command over one key to the primary that holds the key.
    pub(super) async fn send(&self, command: &Cmd, context: &'static str) -> Result<Value, Error> {
        self.repeat(context, || self.link.send(command, false)).await
    }

    /// Asks a primary again whether it may be used, and Sentinel whether it is the master. Does not
    /// repeat.
    ///
    /// # Errors
    ///
    /// [`Refused`](crate::ErrorKind::Refused) for a server that may not be used.
    pub(super) async fn check(&self, _primary: &Primary) -> Result<(), Error> {
        self.link.check().await.map_err(|failure| failure.into_error("checking the server"))
    }

    /// Drops the connections. Every later call fails with [`Unavailable`](crate::ErrorKind::Unavailable).
    pub(super) async fn close(&self) {
        self.link.close();
    }

    /// Repeats `attempt` until it succeeds, fails for good, or the time of the call is up.
    async fn repeat<T, F>(
        &self,
        context: &'static str,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let deadline = Instant::now() + self.call_timeout;
        let mut pauses = ExponentialBuilder::new()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(LONGEST_PAUSE)
            .with_jitter()
            .without_max_times()
            .build();
        // The first error after which the outcome is unknown: a later refusal does not change that.
        let mut unknown: Option<Error> = None;
        loop {
            let failure = match timeout_at(deadline, attempt()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(failure)) => failure,
                Err(_) => Failure::TimedOut,
            };
            let pause = pauses.next().unwrap_or(LONGEST_PAUSE);
            let is_last = !failure.is_worth_repeating() || Instant::now() + pause >= deadline;
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
}
