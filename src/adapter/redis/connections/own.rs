//! [`RedisConnection`]: a connection of the user.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use redis::aio::{ConnectionLike, ConnectionManager, MultiplexedConnection};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Mutex;

use super::super::options::RedisOptions;
use super::super::script::{Form, ScriptCall};
use super::super::url::Address;
use super::failure::{Failure, is_unknown_script, is_unreadable_script};
use super::fitness::{ServerInfo, info};
use super::lane::Durability;
use super::link::ReplicasSeen;
use super::node::durability;
use super::slots::{ALL_SLOTS, Shards, SlotMap};
use super::target::warn_without_info;

/// A connection of yours, for [`RedisAdapter::new`](crate::adapter::RedisAdapter::new).
///
/// Its timeouts are yours: keep them below the layer's
/// [`store_timeout`](crate::DedupLayer::store_timeout). A `MultiplexedConnection` does not connect again
/// after an error; the other two do.
///
/// A `ConnectionManager` does not connect again after a timeout. Over a connection that has fallen silent,
/// every call fails until the operating system closes it: on Linux after about 15 minutes
/// (`net.ipv4.tcp_retries2`). An on-arrival event is lost if its release cannot be sent for 10 minutes. So set
/// `TCP_USER_TIMEOUT`, as a connection by URL has it:
///
/// ```
/// # #[cfg(target_os = "linux")]
/// # fn client() -> Result<(), redis::RedisError> {
/// use std::time::Duration;
/// use redis::IntoConnectionInfo;
/// use redis::io::tcp::TcpSettings;
///
/// let tcp = TcpSettings::default().set_user_timeout(Duration::from_secs(5));
/// let server = "redis://127.0.0.1".into_connection_info()?.set_tcp_settings(tcp);
/// let client = redis::Client::open(server)?;
/// // Then `client.get_connection_manager().await?`.
/// # Ok(())
/// # }
/// # #[cfg(target_os = "linux")]
/// # client().unwrap();
/// ```
///
/// The server holds up all commands behind `WAIT` on its connection, yours too. So on a
/// `MultiplexedConnection` or a `ConnectionManager`, one call at a time waits for replicas. An on-arrival release
/// waits for at most 100 ms, and a call with [`wait_replicas`](RedisOptions::wait_replicas) for the time given
/// there. A connection by URL waits beside the other calls.
///
/// Through a `ClusterConnection`, an on-arrival release waits if any primary had a replica in the last 10 minutes,
/// because the client does not say which primary replies.
#[derive(Clone)]
pub struct RedisConnection(Kind);

#[derive(Clone)]
enum Kind {
    Server(MultiplexedConnection),
    Manager(ConnectionManager),
    Cluster(ClusterConnection),
}

impl std::fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Kind::Server(_) => "RedisConnection(MultiplexedConnection)",
            Kind::Manager(_) => "RedisConnection(ConnectionManager)",
            Kind::Cluster(_) => "RedisConnection(ClusterConnection)",
        })
    }
}

impl RedisConnection {
    /// Returns `true` if all calls share one connection to one server.
    fn is_shared(&self) -> bool {
        matches!(self.0, Kind::Server(_) | Kind::Manager(_))
    }
}

impl From<MultiplexedConnection> for RedisConnection {
    fn from(connection: MultiplexedConnection) -> Self {
        Self(Kind::Server(connection))
    }
}

impl From<ConnectionManager> for RedisConnection {
    fn from(connection: ConnectionManager) -> Self {
        Self(Kind::Manager(connection))
    }
}

impl From<ClusterConnection> for RedisConnection {
    fn from(connection: ClusterConnection) -> Self {
        Self(Kind::Cluster(connection))
    }
}

/// How long a release waits for a replica on a connection that other calls share.
const SHARED_BOUND: Duration = Duration::from_millis(100);

/// The user's connection, and what is known of its server.
pub(super) struct Own {
    connection: RedisConnection,
    durability: Durability,
    /// Held by the call that waits for replicas on a connection that other calls share.
    waiting: Mutex<()>,
    evictable: bool,
    /// Of all primaries together: the client does not say which one has replied.
    replicas_seen: ReplicasSeen,
    lacks_flags: AtomicBool,
    is_checked: AtomicBool,
    is_closed: AtomicBool,
}

impl Own {
    pub(super) fn new(connection: RedisConnection, options: &RedisOptions) -> Self {
        let mut durability = durability(options);
        if connection.is_shared() && durability.replicas.is_none() {
            durability.bound = SHARED_BOUND;
        }
        Self {
            connection,
            durability,
            waiting: Mutex::default(),
            evictable: options.evictable,
            replicas_seen: ReplicasSeen::default(),
            lacks_flags: AtomicBool::new(false),
            is_checked: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Runs a script. Checks the servers before the first call.
    pub(super) async fn run(&self, call: &ScriptCall, durably: bool) -> Result<Value, Failure> {
        if !self.is_checked.load(Ordering::Acquire) {
            self.check().await?;
            self.is_checked.store(true, Ordering::Release);
        }
        let form = || Form {
            knows_flags: !self.lacks_flags.load(Ordering::Relaxed),
            force_write: durably,
        };
        let reply = match self.send_script(call, call.by_hash(form()), durably).await {
            Err(Failure::Redis(error)) if is_unknown_script(&error) => {
                self.send_script(call, call.by_text(form()), durably).await
            }
            reply => reply,
        };
        match reply {
            Err(Failure::Redis(error)) if form().knows_flags && is_unreadable_script(&error) => {
                self.lacks_flags.store(true, Ordering::Relaxed);
                self.send_script(call, call.by_text(form()), durably).await
            }
            reply => reply,
        }
    }

    async fn send_script(
        &self,
        call: &ScriptCall,
        command: Cmd,
        durably: bool,
    ) -> Result<Value, Failure> {
        if !durably {
            return self.send(call.key(), &command).await;
        }
        let replicas = match self.durability.replicas {
            Some(replicas) => replicas,
            None => self.replicas_seen.wanted(self.replicas_of(call.key()).await?),
        };
        if replicas == 0 {
            return self.send(call.key(), &command).await;
        }
        let bound = u64::try_from(self.durability.bound.as_millis()).unwrap_or(u64::MAX);
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline.add_command(command).cmd("WAIT").arg(replicas).arg(bound);
        // Several of them would hold up the other calls for the sum of their bounds.
        let waiting =
            if self.connection.is_shared() { Some(self.waiting.lock().await) } else { None };
        let replies = self.send_all(call.key(), pipeline).await;
        drop(waiting);
        let mut replies = replies.map_err(|error| self.failure(error))?.into_iter();
        let reply = replies.next().unwrap_or(Value::Nil).extract_error()?;
        match replies.next() {
            Some(Value::Int(have)) if have >= i64::from(replicas) => Ok(reply),
            _ => Err(Failure::TooFewReplicas),
        }
    }

    async fn replicas_of(&self, key: &[u8]) -> Result<u32, Failure> {
        let info =
            ServerInfo::of_replies(vec![refusal(self.send(key, &info("replication")).await)?])?;
        Ok(info.map_or(0, |info| info.replicas()))
    }

    /// Sends a command to the server of this key.
    pub(super) async fn send(&self, key: &[u8], command: &Cmd) -> Result<Value, Failure> {
        self.route(command, RoutingInfo::SingleNode(at_key(key))).await
    }

    /// Sends a command to this primary.
    pub(super) async fn ask(&self, primary: &Address, command: &Cmd) -> Result<Value, Failure> {
        let Address { host, port } = primary.clone();
        let routing = SingleNodeRoutingInfo::ByAddress { host, port };
        self.route(command, RoutingInfo::SingleNode(routing)).await
    }

    async fn route(&self, command: &Cmd, routing: RoutingInfo) -> Result<Value, Failure> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Failure::Closed);
        }
        let reply = match self.connection.0.clone() {
            Kind::Server(mut connection) => connection.req_packed_command(command).await,
            Kind::Manager(mut connection) => connection.req_packed_command(command).await,
            Kind::Cluster(mut connection) => {
                connection.route_command(command.clone(), routing).await
            }
        };
        reply.and_then(Value::extract_error).map_err(|error| self.failure(error))
    }

    fn failure(&self, error: RedisError) -> Failure {
        let is_broken =
            matches!(self.connection.0, Kind::Server(_)) && error.is_unrecoverable_error();
        if is_broken { Failure::Broken(error) } else { Failure::Redis(error) }
    }

    /// Sends the commands at once, on one connection. The cluster client sends all of them again if one is
    /// redirected.
    async fn send_all(&self, key: &[u8], pipeline: Pipeline) -> RedisResult<Vec<Value>> {
        let count = pipeline.len();
        match self.connection.0.clone() {
            Kind::Server(mut connection) => {
                connection.req_packed_commands(&pipeline, 0, count).await
            }
            Kind::Manager(mut connection) => {
                connection.req_packed_commands(&pipeline, 0, count).await
            }
            Kind::Cluster(mut connection) => {
                connection.route_pipeline(pipeline, 0, count, at_key(key)).await
            }
        }
    }

    pub(super) async fn primaries(&self) -> Result<Vec<Address>, Failure> {
        Ok(self.shards().await?.into_iter().map(|(primary, _)| primary).collect())
    }

    pub(super) async fn shards(&self) -> Result<Shards, Failure> {
        // The connection does not say where it leads.
        let own = Address { host: "connection".to_owned(), port: 0 };
        if !matches!(self.connection.0, Kind::Cluster(_)) {
            return Ok(vec![(own, vec![ALL_SLOTS])]);
        }
        let mut command = Cmd::new();
        command.arg("CLUSTER").arg("SLOTS");
        let any = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
        let slots = SlotMap::read(self.route(&command, any).await?, &own);
        Ok(slots.map(|slots| slots.shards()).unwrap_or_default())
    }

    /// Asks every primary whether it may be used.
    pub(super) async fn check(&self) -> Result<(), Failure> {
        let primaries = self.primaries().await?;
        join_all(primaries.iter().map(|primary| self.check_one(primary)))
            .await
            .into_iter()
            .collect()
    }

    async fn check_one(&self, primary: &Address) -> Result<(), Failure> {
        let mut replies = Vec::new();
        for section in ["server", "memory", "replication"] {
            replies.push(refusal(self.ask(primary, &info(section)).await)?);
        }
        let in_cluster = matches!(self.connection.0, Kind::Cluster(_));
        let info = ServerInfo::of_replies(replies)?;
        if info.is_none() {
            warn_without_info();
        }
        let info = info.unwrap_or_default();
        if info.replicas() > 0 {
            self.replicas_seen.note();
        }
        if !info.knows_flags() {
            self.lacks_flags.store(true, Ordering::Relaxed);
        }
        match info.fault(self.evictable, in_cluster) {
            None => Ok(()),
            Some(fault) => {
                self.is_checked.store(false, Ordering::Release);
                Err(Failure::Unfit(fault))
            }
        }
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

/// Returns a refusal of the server as its reply.
fn refusal(reply: Result<Value, Failure>) -> Result<Value, Failure> {
    match reply {
        Err(Failure::Redis(error)) => Ok(Value::ServerError(error.try_into()?)),
        reply => reply,
    }
}

fn at_key(key: &[u8]) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use futures_util::future::join;

    use super::super::fake::{Fake, bulk};
    use super::*;
    use crate::adapter::redis::script::{CLAIM, RELEASE};

    async fn own(server: &Fake) -> Own {
        let client = redis::Client::open(format!("redis://{}", server.address())).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        Own::new(connection.into(), &RedisOptions::new())
    }

    fn release() -> ScriptCall {
        ScriptCall::new(&RELEASE, b"dedup:test:a".to_vec())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_short_wait_at_a_time_holds_up_the_connection_of_the_user() {
        // The replica is silent, and `WAIT` holds up its connection until a claim is on its way.
        let (waits, claims) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (waiting, claiming) = (Arc::clone(&waits), Arc::clone(&claims));
        let server = Fake::start(move |words| match words[0].as_str() {
            "INFO" => bulk("role:master\r\nslave0:state=online\r\n"),
            "WAIT" => {
                waiting.store(true, Ordering::Relaxed);
                // Other tasks of this thread move to another one.
                tokio::task::block_in_place(|| {
                    let begun = Instant::now();
                    while !claiming.load(Ordering::Relaxed) && begun.elapsed().as_secs() < 5 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    std::thread::sleep(Duration::from_millis(50));
                });
                ":0\r\n".to_owned()
            }
            _ => ":7\r\n".to_owned(),
        })
        .await;
        let own = own(&server).await;
        let call = release();
        own.run(&call, false).await.unwrap();
        let releases = join(own.run(&call, true), own.run(&call, true));
        let claim = async {
            while !waits.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            claims.store(true, Ordering::Relaxed);
            own.run(&ScriptCall::new(&CLAIM, b"dedup:test:b".to_vec()), false).await.unwrap();
            server.received("WAIT").len()
        };
        let ((one, other), waits_before) = join(releases, claim).await;
        assert!(matches!(
            (one, other),
            (Err(Failure::TooFewReplicas), Err(Failure::TooFewReplicas))
        ));
        let waits = server.received("WAIT");
        assert_eq!((waits_before, waits.len()), (1, 2));
        assert!(waits.iter().all(|words| words[2] == "100"), "{waits:?}");
    }

    #[tokio::test]
    async fn release_does_not_wait_where_info_is_refused() {
        let server = Fake::start(|words| match words[0].as_str() {
            "INFO" => "-NOPERM no\r\n".to_owned(),
            _ => ":7\r\n".to_owned(),
        })
        .await;
        let own = own(&server).await;
        assert_eq!(own.run(&release(), true).await.unwrap(), Value::Int(7));
        assert!(server.received("WAIT").is_empty());
    }
}
