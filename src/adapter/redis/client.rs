//! [`RedisClient`]: what opens connections, and [`Connection`]: one that is open.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::{ClusterClient, ClusterClientBuilder, ClusterConfig};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, Pipeline,
    RedisConnectionInfo, RedisResult, TlsMode, Value,
};
use tokio::sync::Mutex;

use super::options::RedisOptions;
use super::url::{Endpoint, ServerKind};
use crate::error::{ConfigError, StoreError};

/// A connection that carries nothing is probed after this time, so that a dead one is noticed.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// After this time without an acknowledgement, the kernel gives up a connection and what it still
/// has to send.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);
/// How many commands one connection queues before their callers wait.
const QUEUED: usize = 1_024;

/// Your own client, for [`RedisAdapter::new`](crate::adapter::RedisAdapter::new): a
/// `redis::Client`, a `SentinelClient` for the master, or a `ClusterClient`.
///
/// The adapter opens its own connections through the client, and opens them again if they break or
/// become silent. The client sets TLS, certificates, passwords and TCP options. [`RedisOptions`]
/// sets the time limits of a call.
///
/// A `SentinelClient` or `ClusterClient` with TLS by rustls needs a cryptographic provider of the
/// process: see [`RedisAdapter`](crate::adapter::RedisAdapter#tls).
///
/// Set `TCP_NODELAY`, which `redis` leaves off: `TcpSettings::default().set_nodelay(true)`. A
/// `ClusterClient` waits for 1.28 s before it repeats a command, unless you set `retries(3)`,
/// `min_retry_wait(20)` and `max_retry_wait(200)`. It ends each call after its own response
/// timeout, unless you set `overall_response_timeout(None)`. With a URL, the adapter sets all of
/// this.
///
/// Clones lead to the same servers.
#[derive(Clone)]
pub struct RedisClient(Leads);

#[derive(Clone)]
enum Leads {
    Server(Box<Client>),
    Sentinel(Arc<Mutex<SentinelClient>>),
    Cluster(Box<ClusterClient>),
}

/// Shows nothing of the client, which holds passwords.
impl std::fmt::Debug for RedisClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RedisClient")
    }
}

impl From<Client> for RedisClient {
    fn from(client: Client) -> Self {
        Self(Leads::Server(Box::new(client)))
    }
}

impl From<SentinelClient> for RedisClient {
    fn from(client: SentinelClient) -> Self {
        Self(Leads::Sentinel(Arc::new(Mutex::new(client))))
    }
}

impl From<ClusterClient> for RedisClient {
    fn from(client: ClusterClient) -> Self {
        Self(Leads::Cluster(Box::new(client)))
    }
}

impl RedisClient {
    /// Returns the client of a URL. Connects to nothing.
    ///
    /// # Errors
    ///
    /// A URL that `redis` cannot use; with TLS, as [`provide_tls`].
    pub(super) fn of_url(endpoint: Endpoint) -> Result<Self, StoreError> {
        if endpoint.tls {
            provide_tls()?;
        }
        let node = |node: ConnectionInfo| {
            // The name needs a right of its own.
            let settings = node.redis_settings().clone().set_skip_set_lib_name();
            node.set_redis_settings(settings).set_tcp_settings(tcp_settings())
        };
        let nodes: Vec<_> = endpoint.nodes.into_iter().map(node).collect();
        let client = match (endpoint.kind, &*nodes) {
            (ServerKind::Server, [node, ..]) => Client::open(node.clone()).map(Self::from),
            (ServerKind::Sentinel, [node, ..]) => {
                // The user, the password and the database are those of the master.
                let master = SentinelNodeConnectionInfo::default()
                    .set_redis_connection_info(node.redis_settings().clone())
                    .set_tcp_settings(tcp_settings());
                let tls = TlsMode::Secure;
                let master = if endpoint.tls { master.set_tls_mode(tls) } else { master };
                let bare = RedisConnectionInfo::default;
                let nodes = nodes.into_iter().map(|it| it.set_redis_settings(bare())).collect();
                let kind = SentinelServerType::Master;
                SentinelClient::build(nodes, endpoint.master, Some(master), kind).map(Self::from)
            }
            _ => ClusterClientBuilder::new(nodes)
                .retries(3)
                .min_retry_wait(20)
                .max_retry_wait(200)
                .overall_response_timeout(None)
                .tcp_settings(tcp_settings())
                .build()
                .map(Self::from),
        };
        client.map_err(|_| ConfigError::url().into())
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.0, Leads::Cluster(_))
    }

    pub(super) fn is_sentinel(&self) -> bool {
        matches!(self.0, Leads::Sentinel(_))
    }

    /// Opens connections to the same servers.
    pub(super) async fn connect(
        &self,
        options: &RedisOptions,
        count: usize,
    ) -> RedisResult<Vec<Connection>> {
        // The adapter bounds each command itself.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(QUEUED);
        let client = match &self.0 {
            Leads::Server(client) => {
                if matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. }) {
                    provide_tls().map_err(std::io::Error::other)?;
                }
                Client::clone(client)
            }
            // Asks the master too whether it is one.
            Leads::Sentinel(client) => client.lock().await.async_get_client().await?,
            Leads::Cluster(client) => {
                let config = ClusterConfig::new()
                    .set_connection_timeout(options.connect_timeout)
                    // The client asks nodes for the slots too, and whether they live.
                    .set_response_timeout(options.reply_timeout());
                let open = |_| client.get_async_connection_with_config(config.clone());
                let opened = try_join_all((0..count).map(open)).await?;
                return Ok(opened.into_iter().map(Connection::Cluster).collect());
            }
        };
        let open = |_| client.get_multiplexed_async_connection_with_config(&config);
        let opened = try_join_all((0..count).map(open)).await?.into_iter();
        let address = client.get_connection_info().addr().to_string();
        Ok(opened.map(|opened| Connection::Server(opened, address.clone())).collect())
    }
}

fn tcp_settings() -> TcpSettings {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_INTERVAL);
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(UNACKNOWLEDGED);
    tcp
}

/// Sees that the process has a cryptographic provider, because `redis` takes that of the process.
/// Without one, rustls panics if the crates of the program have brought none, or two.
///
/// A provider that is there stays.
///
/// # Errors
///
/// If there is none, and the features have none either.
fn provide_tls() -> Result<(), ConfigError> {
    #[cfg(feature = "tls-rustls-no-provider")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // With both features, `sqlx` takes ring.
        #[cfg(feature = "tls-rustls-ring")]
        let provider = Some(rustls::crypto::ring::default_provider());
        #[cfg(all(feature = "tls-rustls-aws-lc-rs", not(feature = "tls-rustls-ring")))]
        let provider = Some(rustls::crypto::aws_lc_rs::default_provider());
        #[cfg(not(any(feature = "tls-rustls-ring", feature = "tls-rustls-aws-lc-rs")))]
        let provider: Option<rustls::crypto::CryptoProvider> = None;
        // Another task may have installed one just now.
        let _ = provider.ok_or_else(no_provider)?.install_default();
    }
    Ok(())
}

#[cfg(feature = "tls-rustls-no-provider")]
fn no_provider() -> ConfigError {
    ConfigError::setting("CryptoProvider", "installed before the first encrypted connection")
}

/// An open connection.
pub(super) enum Connection {
    /// With its address.
    Server(MultiplexedConnection, String),
    Cluster(ClusterConnection),
}

impl Connection {
    fn handle(&self) -> Box<dyn ConnectionLike + Send> {
        match self {
            Self::Server(connection, _) => Box::new(connection.clone()),
            Self::Cluster(connection) => Box::new(connection.clone()),
        }
    }

    /// Sends a script. In a cluster, `redis` sends it to the primary of its key.
    pub(super) async fn send(&self, script: &Cmd) -> RedisResult<Value> {
        // A script's error is a value of its reply.
        self.handle().req_packed_command(script).await.and_then(Value::extract_error)
    }

    /// Sends a script and what stands behind it, on one connection. In a cluster, `redis` sends
    /// both again after a redirection.
    pub(super) async fn send_all(&self, pipeline: &Pipeline) -> RedisResult<Vec<Value>> {
        self.handle().req_packed_commands(pipeline, 0, pipeline.len()).await
    }

    /// Sends a command without a key to the primary at `address`.
    pub(super) async fn ask(&self, address: &str, command: &Cmd) -> RedisResult<Value> {
        let Self::Cluster(connection) = self else { return self.send(command).await };
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        let (host, port) = (host.to_owned(), port.parse().unwrap_or_default());
        let node = SingleNodeRoutingInfo::ByAddress { host, port };
        routed(connection, command, RoutingInfo::SingleNode(node)).await
    }

    /// Sends a command without a key to every primary. Returns the address and the reply of each. A
    /// refusal is a reply, and so is an error without an address for primaries that are not
    /// connected. Fails if one primary does not reply.
    pub(super) async fn ask_all(
        &self,
        command: &Cmd,
    ) -> RedisResult<Vec<(String, RedisResult<Value>)>> {
        let connection = match self {
            Self::Cluster(connection) => connection,
            Self::Server(_, address) => match self.send(command).await {
                Err(error) if error.code().is_none() => return Err(error),
                reply => return Ok(vec![(address.clone(), reply)]),
            },
        };
        let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let Value::Map(replies) = routed(connection, command, all).await? else {
            return Ok(Vec::new());
        };
        let any = RoutingInfo::SingleNode(SingleNodeRoutingInfo::RandomPrimary);
        let slots = routed(connection, redis::cmd("CLUSTER").arg("SLOTS"), any).await?;
        // Each range has the first slot, the last slot, the primary with its host and its port, and
        // the replicas.
        let ranges: Vec<Vec<Value>> = redis::from_redis_value(slots)?;
        let mut primaries = Vec::new();
        for range in &ranges {
            let primary = range.get(2).and_then(|node| node.as_sequence()?.get(..2));
            primaries.extend(primary.filter(|it| !primaries.contains(it)));
        }
        // `redis` asks only those that it is connected to.
        let missing = (replies.len() < primaries.len()).then(|| {
            let why = "a primary of the cluster is not connected";
            (String::new(), Err((redis::ErrorKind::ClusterConnectionNotFound, why).into()))
        });
        let named = |(address, reply): (Value, Value)| {
            Ok((redis::from_redis_value(address)?, reply.extract_error()))
        };
        replies.into_iter().map(named).chain(missing.map(Ok)).collect()
    }
}

async fn routed(cluster: &ClusterConnection, command: &Cmd, to: RoutingInfo) -> RedisResult<Value> {
    cluster.clone().route_command(command.clone(), to).await?.extract_error()
}
