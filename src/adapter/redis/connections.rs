//! [`Connections`]: the connections to one server, to the master that Sentinel names, or to a cluster.

use redis::aio::MultiplexedConnection;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, RedisError, ServerErrorKind, Value};
use tokio::sync::Mutex;

use super::errors::store_error;
use super::options::RedisOptions;
use super::script::{Form, ScriptCall};
use crate::error::{ConfigError, Error, ErrorKind};

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
    client: Client,
    config: AsyncConnectionConfig,
    current: Mutex<Option<MultiplexedConnection>>,
}

impl Connections {
    /// Reads a URL. Connects to nothing.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for a URL that cannot be read.
    pub(super) fn from_url(url: &str, options: &RedisOptions) -> Result<Self, Error> {
        let client = Client::open(url).map_err(|_| ConfigError::InvalidUrl)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.response_timeout));
        Ok(Self { client, config, current: Mutex::new(None) })
    }

    /// Runs a script on the primary that holds its key.
    ///
    /// A call whose outcome is unknown is repeated within a bound, because every script is idempotent.
    pub(super) async fn run(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        let mut connection = self.connection(context).await?;
        let form = Form { knows_flags: true, force_write: false };
        let reply = connection.send_packed_command(&call.by_hash(form)).await;
        let reply = match reply.and_then(Value::extract_error) {
            Err(error) if is_unknown_script(&error) => {
                connection.send_packed_command(&call.by_text(form)).await
            }
            reply => reply,
        };
        self.checked(reply, context).await
    }

    /// Runs a script as [`run`](Self::run) does, and returns once a replica has its writes, if the
    /// primary has replicas.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`], with an unknown outcome, if too few replicas reply in time.
    pub(super) async fn run_durably(
        &self,
        call: &ScriptCall,
        context: &'static str,
    ) -> Result<Value, Error> {
        self.run(call, context).await
    }

    /// Returns the primaries of the topology.
    pub(super) async fn primaries(&self) -> Result<Vec<Primary>, Error> {
        let address = self.client.get_connection_info().addr().to_string();
        Ok(vec![Primary { address }])
    }

    /// Sends a command without a key to one primary.
    pub(super) async fn ask(
        &self,
        _primary: &Primary,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Value, Error> {
        let mut connection = self.connection(context).await?;
        let reply = connection.send_packed_command(command).await;
        self.checked(reply, context).await
    }

    /// Sends a command over one key to the primary that holds the key.
    pub(super) async fn send(&self, command: &Cmd, context: &'static str) -> Result<Value, Error> {
        let mut connection = self.connection(context).await?;
        let reply = connection.send_packed_command(command).await;
        self.checked(reply, context).await
    }

    /// Drops the connections. Every later call fails with [`ErrorKind::Unavailable`].
    pub(super) async fn close(&self) {
        *self.current.lock().await = None;
    }

    async fn connection(&self, context: &'static str) -> Result<MultiplexedConnection, Error> {
        let mut current = self.current.lock().await;
        if let Some(connection) = &*current {
            return Ok(connection.clone());
        }
        let connection = self
            .client
            .get_multiplexed_async_connection_with_config(&self.config)
            .await
            .map_err(|error| store_error(context, error))?;
        *current = Some(connection.clone());
        Ok(connection)
    }

    async fn checked(
        &self,
        reply: Result<Value, RedisError>,
        context: &'static str,
    ) -> Result<Value, Error> {
        // A script's error is a value of its reply.
        let reply = reply.and_then(Value::extract_error);
        let error = match reply {
            Ok(value) => return Ok(value),
            Err(error) => store_error(context, error),
        };
        if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
            *self.current.lock().await = None;
        }
        Err(error)
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(ServerErrorKind::NoScript)
}
