//! [`Connections`]: the connections to one server, to the master that Sentinel names, or to a cluster.
//!
//! 1. One task at a time opens a connection. All callers wait for it, each within its own time.
//! 2. A connection is dropped after an error of the connection, and after a reply that did not come in
//!    time. A silent connection costs one call, not the process.
//! 3. A call is repeated within [`RedisOptions::call_timeout`], because every script is idempotent by its
//!    token: a claim finds its own row, or another version than it names. If one attempt may have been
//!    executed, the outcome of the call is unknown.
//! 4. Every server is asked at every connection whether it may be used.

mod cluster;
mod failure;
#[cfg(test)]
mod fake;
mod fitness;
mod lane;
mod link;
mod node;
mod own;
mod sentinel;
mod single;
mod slots;
mod target;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use redis::{Arg, Cmd, ErrorKind, RedisConnectionInfo, RedisError, Value};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::cluster::Cluster;
use self::failure::Failure;
use self::link::Target;
use self::node::{Node, Sent};
use self::own::Own;
pub use self::own::RedisConnection;
use self::sentinel::Sentinel;
pub(super) use self::slots::slot;
use self::slots::{ALL_SLOTS, Shards};
use super::options::RedisOptions;
use super::script::ScriptCall;
use super::url::{Address, Endpoint, Kind};
use crate::error::Error;

/// The pauses before a repetition.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A primary, as the topology names it now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Primary {
    /// `host:port`.
    pub(super) address: String,
}

impl Primary {
    fn address(&self) -> Result<Address, Failure> {
        let none = Address { host: String::new(), port: 0 };
        let error = || RedisError::from((ErrorKind::Client, "not an address of a primary"));
        Ok(none.named_by(&self.address).ok_or_else(error)?)
    }
}

/// The connections of one adapter.
pub(super) struct Connections {
    topology: Topology,
    call_timeout: Duration,
    /// Every script waits for replicas.
    is_durable: bool,
}

enum Topology {
    One(Node),
    Cluster(Arc<Cluster>),
    Own(Own),
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
        let topology = match endpoint.kind {
            Kind::Server => {
                let address = endpoint.addresses[0].clone();
                let client = target::client(&address, endpoint.tls, redis, options)?;
                let target = Target::Server { client: client.into(), address, in_cluster: false };
                Topology::One(Node::new(&target, options))
            }
            Kind::Sentinel => {
                let sentinel = Arc::new(Sentinel::new(&endpoint, redis, options)?);
                Topology::One(Node::new(&Target::Sentinel(sentinel), options))
            }
            Kind::Cluster => Topology::Cluster(Cluster::new(&endpoint, redis, options)?),
        };
        Ok(Self::of(topology, options))
    }

    /// Uses a connection of the user.
    pub(super) fn from_own(connection: RedisConnection, options: &RedisOptions) -> Self {
        Self::of(Topology::Own(Own::new(connection, options)), options)
    }

    fn of(topology: Topology, options: &RedisOptions) -> Self {
        let is_durable = options.wait_replicas.is_some();
        Self { topology, call_timeout: options.call_timeout, is_durable }
    }

    /// Connects, and checks each primary that can be reached. Tries once.
    ///
    /// # Errors
    ///
    /// [`ConfigError`](crate::ConfigError) for a server that may not be used;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if none can be reached.
    pub(super) async fn connect(&self) -> Result<(), Error> {
        let fault = match &self.topology {
            Topology::One(node) => node.link.live().await.map(|live| live.fault()),
            Topology::Cluster(cluster) => cluster.connect().await,
            Topology::Own(_) => Ok(None),
        };
        let fault = fault.map_err(|failure| failure.into_error("connecting to Redis"))?;
        fault.map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Runs a script on the primary that holds its key. Waits for replicas, if the options say so.
    ///
    /// A call whose outcome is unknown is repeated within a bound, because every script is idempotent.
    pub(super) async fn run(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.repeat(context, || self.attempt(call, self.is_durable)).await
    }

    /// Runs a script as [`run`](Self::run) does, and never waits for replicas.
    pub(super) async fn run_at_once(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.repeat(context, || self.attempt(call, false)).await
    }

    /// Runs a script as [`run`](Self::run) does, and returns once a replica has its writes, if the
    /// primary has replicas.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable), with an unknown outcome, if too few replicas
    /// reply in time.
    pub(super) async fn run_durably(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.repeat(context, || self.attempt(call, true)).await
    }

    /// Runs a script that must not be repeated, as [`run_durably`](Self::run_durably) does otherwise.
    pub(super) async fn run_durably_once(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        let value = timeout(self.call_timeout, self.attempt(call, true)).await;
        value.unwrap_or(Err(Failure::TimedOut)).map_err(|failure| failure.into_error(context))
    }

    /// Returns the time at which a call ends that begins now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.call_timeout
    }

    async fn attempt(&self, call: &ScriptCall, durably: bool) -> Result<Value, Failure> {
        let sent = Sent::Script { call, durably };
        match &self.topology {
            Topology::One(node) => node.send(sent, false).await,
            Topology::Cluster(cluster) => cluster.send(call.key(), sent).await,
            Topology::Own(own) => own.run(call, durably).await,
        }
    }

    /// Returns the primaries of the topology.
    pub(super) async fn primaries(&self) -> Result<Vec<Primary>, Error> {
        let addresses = self.repeat("finding the primaries", || self.addresses()).await?;
        let primary = |address: Address| Primary { address: address.to_string() };
        Ok(addresses.into_iter().map(primary).collect())
    }

    /// Returns the primaries with the ranges of their slots; outside of a cluster, all slots.
    pub(super) async fn shards(&self) -> Result<Vec<(Primary, Vec<(u16, u16)>)>, Error> {
        let attempt = || async {
            match &self.topology {
                Topology::One(_) => {
                    let addresses = self.addresses().await?;
                    Ok(addresses.into_iter().map(|address| (address, vec![ALL_SLOTS])).collect())
                }
                Topology::Cluster(cluster) => cluster.shards().await,
                Topology::Own(own) => own.shards().await,
            }
        };
        let shards: Shards = self.repeat("finding the primaries", attempt).await?;
        let primary =
            |(address, slots): (Address, _)| (Primary { address: address.to_string() }, slots);
        Ok(shards.into_iter().map(primary).collect())
    }

    async fn addresses(&self) -> Result<Vec<Address>, Failure> {
        match &self.topology {
            Topology::One(node) => match node.link.address() {
                Some(address) => Ok(vec![address]),
                None => Ok(vec![node.link.live().await?.address().clone()]),
            },
            Topology::Cluster(cluster) => cluster.primaries().await,
            Topology::Own(own) => own.primaries().await,
        }
    }

    /// Sends a command without a key to one primary.
    pub(super) async fn ask(
        &self,
        primary: &Primary,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Value, Error> {
        let attempt = || async {
            match &self.topology {
                Topology::One(node) => node.send(Sent::Command(command), false).await,
                Topology::Cluster(cluster) => {
                    cluster.node(&primary.address()?)?.send(Sent::Command(command), false).await
                }
                Topology::Own(own) => own.ask(&primary.address()?, command).await,
            }
        };
        self.repeat(context, attempt).await
    }

    /// Sends a command over one key to the primary that holds the key.
    pub(super) async fn send(&self, command: &Cmd, context: &'static str) -> Result<Value, Error> {
        let key = match command.args_iter().nth(1) {
            Some(Arg::Simple(key)) => key,
            _ => &[],
        };
        let attempt = || async {
            match &self.topology {
                Topology::One(node) => node.send(Sent::Command(command), false).await,
                Topology::Cluster(cluster) => cluster.send(key, Sent::Command(command)).await,
                Topology::Own(own) => own.send(key, command).await,
            }
        };
        self.repeat(context, attempt).await
    }

    /// Asks each primary again whether it may be used, and Sentinel which server is the master. Tries once.
    ///
    /// # Errors
    ///
    /// [`Refused`](crate::ErrorKind::Refused) for a server that may not be used. The other servers were
    /// asked too.
    pub(super) async fn check(&self) -> Result<(), Error> {
        let checked = async {
            match &self.topology {
                Topology::One(node) => node.check().await,
                Topology::Cluster(cluster) => cluster.check().await,
                Topology::Own(own) => own.check().await,
            }
        };
        let checked = timeout(self.call_timeout, checked).await.unwrap_or(Err(Failure::TimedOut));
        checked.map_err(|failure| failure.into_error("checking the servers"))
    }

    /// Drops the connections. Every later call fails with [`Unavailable`](crate::ErrorKind::Unavailable).
    pub(super) async fn close(&self) {
        match &self.topology {
            Topology::One(node) => node.close(),
            Topology::Cluster(cluster) => cluster.close(),
            Topology::Own(own) => own.close(),
        }
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
        let deadline = self.deadline();
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
