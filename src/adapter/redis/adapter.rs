//! [`RedisAdapter`]: its calls and its maintenance.

use std::sync::Arc;

use super::connections::Connections;
use super::follow::Follower;
use super::losses::{StoreLoss, StoredLoss};
use super::options::RedisOptions;
use crate::error::Error;

/// Keeps keys in Redis or Valkey: one server, Sentinel, or Cluster.
///
/// A clone is another handle to the same connections and the same state.
#[derive(Clone)]
pub struct RedisAdapter(Arc<Shared>);

struct Shared {
    connections: Arc<Connections>,
    follower: Follower,
    options: RedisOptions,
}

impl RedisAdapter {
    /// Connects to the server, the Sentinels or the cluster that a URL names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) for a URL that cannot be read.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, RedisOptions::new()).await
    }

    /// Connects with these options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub async fn connect_with(url: &str, options: RedisOptions) -> Result<Self, Error> {
        let connections = Arc::new(Connections::from_url(url, &options)?);
        let follower = Follower::new(&options);
        Ok(Self(Arc::new(Shared { connections, follower, options })))
    }

    /// Returns the losses that this process has found, the newest last, 64 at most.
    #[must_use]
    pub fn losses(&self) -> Vec<StoreLoss> {
        self.0.follower.losses()
    }

    /// Returns the losses that all processes with this store and prefix have found, the newest last, 64 at
    /// most. The store keeps them for 30 days after the last one, unless it loses them too.
    ///
    /// # Errors
    ///
    /// The store could not be read.
    pub async fn stored_losses(&self) -> Result<Vec<StoredLoss>, Error> {
        self.0.follower.stored_losses(&self.0.connections).await
    }
}
