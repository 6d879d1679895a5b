//! [`RedisClient`]: what opens connections, and [`Connection`]: one that is open.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::{ClusterClient, ClusterClientBuilder, ClusterConfig};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr,
};
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    Pipeline, RedisConnectionInfo, RedisResult, Value,
};
use tokio::sync::Mutex;

use super::options::RedisOptions;
use super::tls;
use super::url::{Endpoint, Kind};
use crate::error::{ConfigError, Error};

/// A connection that carries nothing is probed after this time, so that a dead one is noticed.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// After this time without an acknowledgement, the kernel gives up a connection and what it still has to send.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);
/// How many commands one connection queues before their callers wait.
const QUEUED: usize = 1_024;

/// A client of yours, for [`RedisAdapter::new`](crate::adapter::RedisAdapter::new): a `redis::Client`, a
/// `SentinelClient` for the master, or a `ClusterClient`.
///
/// The adapter opens connections of its own by it, and opens them again when they break or fall silent. TLS,
/// certificates, passwords and TCP settings are those of the client. The times of a call are those of
/// [`RedisOptions`].
///
/// A `SentinelClient` or `ClusterClient` with TLS by rustls needs a cryptographic provider of the process: see
/// [`RedisAdapter`](crate::adapter::RedisAdapter#tls).
///
/// Set `TCP_NODELAY`, which `redis` leaves off: `TcpSettings::default().set_nodelay(true)`. A `ClusterClient`
/// waits for 1.28 s before it repeats a command, unless you set `retries(3)`, `min_retry_wait(20)` and
/// `max_retry_wait(200)`. A URL sets all of it.
///
/// Clones lead to the same servers.
#[derive(Clone)]
pub struct RedisClient(Leads);

#[derive(Clone)]
enum Leads {
    Server(Box<Client>),
    Sentinel(Arc<Mutex<Sentinels>>),
    Cluster(Box<ClusterClient>),
}

struct Sentinels {
    client: SentinelClient,
    /// The client of the master that they have named last, and when.
    named: Option<(Client, Instant)>,
}

impl Sentinels {
    /// Returns the client of the master. A reply that came after `since` stands for all that have waited for it: a
    /// silent Sentinel costs a second.
    async fn master(&mut self, since: Instant) -> RedisResult<Client> {
        if let Some((client, at)) = &self.named
            && *at >= since
        {
            return Ok(client.clone());
        }
        // Asks the master too whether it is one.
        let client = self.client.async_get_client().await?;
        self.named = Some((client.clone(), Instant::now()));
        Ok(client)
    }
}

impl std::fmt::Debug for RedisClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Leads::Server(_) => "RedisClient(Client)",
            Leads::Sentinel(_) => "RedisClient(SentinelClient)",
            Leads::Cluster(_) => "RedisClient(ClusterClient)",
        })
    }
}

impl From<Client> for RedisClient {
    fn from(client: Client) -> Self {
        Self(Leads::Server(Box::new(client)))
    }
}

impl From<SentinelClient> for RedisClient {
    fn from(client: SentinelClient) -> Self {
        Self(Leads::Sentinel(Arc::new(Mutex::new(Sentinels { client, named: None }))))
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
    /// [`ConfigError::InvalidUrl`] for a URL that `redis` cannot use; with TLS, as [`tls::provide`].
    pub(super) fn of_url(endpoint: &Endpoint) -> Result<Self, Error> {
        if endpoint.tls {
            tls::provide()?;
        }
        let client = match endpoint.kind {
            Kind::Server => server(endpoint).map(Self::from),
            Kind::Sentinel => sentinel(endpoint).map(Self::from),
            Kind::Cluster => cluster(endpoint).map(Self::from),
        };
        client.map_err(|_| ConfigError::InvalidUrl.into())
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.0, Leads::Cluster(_))
    }

    pub(super) fn is_sentinel(&self) -> bool {
        matches!(self.0, Leads::Sentinel(_))
    }

    /// Opens a connection. Returns the address of its server too; empty for a cluster.
    pub(super) async fn connect(
        &self,
        options: &RedisOptions,
    ) -> RedisResult<(Connection, String)> {
        // The adapter bounds each command itself.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(QUEUED);
        let client = match &self.0 {
            Leads::Server(client) => {
                if matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. }) {
                    tls::provide().map_err(std::io::Error::other)?;
                }
                Client::clone(client)
            }
            Leads::Sentinel(sentinels) => {
                let since = Instant::now();
                sentinels.lock().await.master(since).await?
            }
            Leads::Cluster(client) => {
                let config = ClusterConfig::new()
                    .set_connection_timeout(options.connect_timeout)
                    // The client asks nodes for the slots too, and whether they live.
                    .set_response_timeout(options.response_timeout);
                let connection = client.get_async_connection_with_config(config).await?;
                return Ok((Connection::Cluster(connection), String::new()));
            }
        };
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        let address = client.get_connection_info().addr().to_string();
        Ok((Connection::Server(connection), address))
    }
}

fn server(endpoint: &Endpoint) -> RedisResult<Client> {
    Client::open(node(endpoint, 0)?)
}

fn cluster(endpoint: &Endpoint) -> RedisResult<ClusterClient> {
    let nodes = (0..endpoint.addresses.len()).map(|at| node(endpoint, at));
    ClusterClientBuilder::new(nodes.collect::<RedisResult<Vec<_>>>()?)
        .retries(3)
        .min_retry_wait(20)
        .max_retry_wait(200)
        .overall_response_timeout(None)
        .tcp_settings(tcp_settings())
        .build()
}

fn sentinel(endpoint: &Endpoint) -> RedisResult<SentinelClient> {
    let nodes = (0..endpoint.addresses.len()).map(|at| address(endpoint, at));
    let master = endpoint.master.clone();
    let mut builder = SentinelClientBuilder::new(nodes, master, SentinelServerType::Master)?
        .set_client_to_redis_db(endpoint.database)
        .set_client_to_redis_tcp_settings(tcp_settings())
        .set_client_to_sentinel_tcp_settings(tcp_settings());
    if endpoint.tls {
        builder = builder
            .set_client_to_redis_tls_mode(redis::TlsMode::Secure)
            .set_client_to_sentinel_tls_mode(redis::TlsMode::Secure);
    }
    if let Some(username) = &endpoint.username {
        builder = builder.set_client_to_redis_username(username);
    }
    if let Some(password) = &endpoint.password {
        builder = builder.set_client_to_redis_password(password);
    }
    builder.build()
}

fn address(endpoint: &Endpoint, at: usize) -> ConnectionAddr {
    let super::url::Address { host, port } = endpoint.addresses[at].clone();
    if endpoint.tls {
        ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host, port)
    }
}

fn node(endpoint: &Endpoint, at: usize) -> RedisResult<ConnectionInfo> {
    let mut redis = RedisConnectionInfo::default()
        .set_db(endpoint.database)
        // The name needs a right of its own.
        .set_skip_set_lib_name();
    if let Some(username) = &endpoint.username {
        redis = redis.set_username(username);
    }
    if let Some(password) = &endpoint.password {
        redis = redis.set_password(password);
    }
    let info = address(endpoint, at).into_connection_info()?;
    Ok(info.set_redis_settings(redis).set_tcp_settings(tcp_settings()))
}

fn tcp_settings() -> TcpSettings {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_INTERVAL);
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(UNACKNOWLEDGED);
    tcp
}

/// An open connection. Clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Connection {
    /// Sends a command over one key to the primary of the key.
    pub(super) async fn send(&self, key: &[u8], command: &Cmd) -> RedisResult<Value> {
        let reply = match self.clone() {
            Self::Server(mut connection) => connection.req_packed_command(command).await,
            Self::Cluster(mut connection) => {
                let routing = RoutingInfo::SingleNode(primary_of(key));
                connection.route_command(command.clone(), routing).await
            }
        };
        // A script's error is a value of its reply.
        reply.and_then(Value::extract_error)
    }

    /// Sends a command over one key and what stands behind it, on one connection to the primary of the key. In
    /// a cluster, `redis` sends both again after a redirection.
    pub(super) async fn send_all(&self, key: &[u8], pipeline: Pipeline) -> RedisResult<Vec<Value>> {
        let count = pipeline.len();
        match self.clone() {
            Self::Server(mut connection) => {
                connection.req_packed_commands(&pipeline, 0, count).await
            }
            Self::Cluster(mut connection) => {
                connection.route_pipeline(pipeline, 0, count, primary_of(key)).await
            }
        }
    }

    /// Sends a command without a key to the primary at `address`.
    pub(super) async fn ask(&self, address: &str, command: &Cmd) -> RedisResult<Value> {
        let reply = match self.clone() {
            Self::Server(mut connection) => connection.req_packed_command(command).await,
            Self::Cluster(mut connection) => {
                let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
                let (host, port) = (host.to_owned(), port.parse().unwrap_or_default());
                let node = SingleNodeRoutingInfo::ByAddress { host, port };
                let routing = RoutingInfo::SingleNode(node);
                connection.route_command(command.clone(), routing).await
            }
        };
        reply.and_then(Value::extract_error)
    }

    /// Sends a command without a key to every primary. Returns the address and the reply of each. A refusal is
    /// a reply. Fails if one primary does not reply.
    pub(super) async fn ask_all(
        &self,
        address: &str,
        command: &Cmd,
    ) -> RedisResult<Vec<(String, RedisResult<Value>)>> {
        let Self::Cluster(mut connection) = self.clone() else {
            let reply = match self.ask(address, command).await {
                Err(error) if error.code().is_none() => return Err(error),
                reply => reply,
            };
            return Ok(vec![(address.to_owned(), reply)]);
        };
        let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let replies = connection.route_command(command.clone(), all).await?;
        let Value::Map(replies) = replies.extract_error()? else { return Ok(Vec::new()) };
        let named = |(address, reply): (Value, Value)| {
            Ok((redis::from_redis_value(address)?, reply.extract_error()))
        };
        replies.into_iter().map(named).collect()
    }
}

fn primary_of(key: &[u8]) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
}
