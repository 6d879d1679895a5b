//! [`RedisAdapter`]: how it is made.

use std::fmt;
use std::sync::Arc;

use redis::{Cmd, Value};

use super::client::RedisClient;
use super::errors::Failure;
use super::options::RedisOptions;
use super::slot::{Live, Slot};
use super::url::Endpoint;
use crate::error::StoreError;

/// Keeps keys in Redis or Valkey: one server, Sentinel, or Cluster.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_dedup::StoreError> {
/// use tower_dedup::adapter::RedisAdapter;
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = RedisAdapter::connect("redis://127.0.0.1").await?;
/// let dedup = DedupLayer::new(provider::STRIPE, store);
/// # let _ = dedup;
/// # Ok(())
/// # }
/// ```
///
/// A clone is another handle to the same connections and the same state.
///
#[doc = include_str!("../../docs/stores/redis.md")]
#[derive(Clone)]
pub struct RedisAdapter(pub(super) Arc<Slot>);

impl RedisAdapter {
    /// Connects to the server, the Sentinels or the cluster that a URL names.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config), with a [`ConfigError`](crate::ConfigError) as its
    /// source, for a URL that cannot be read, and for a server that evicts keys, is older than version
    /// 6.0, or is of another kind than the URL says.
    /// [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable) or
    /// [`StoreErrorKind::Timeout`](crate::StoreErrorKind::Timeout) if the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::connect_with(url, RedisOptions::new()).await
    }

    /// Connects with these options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and [`StoreErrorKind::Config`](crate::StoreErrorKind::Config) for an option
    /// that is not valid.
    pub async fn connect_with(url: &str, options: RedisOptions) -> Result<Self, StoreError> {
        let mut endpoint = Endpoint::read(url)?;
        let prefix = endpoint.prefix.take();
        let options = RedisOptions { prefix: prefix.unwrap_or(options.prefix), ..options };
        let adapter = Self::with_options(RedisClient::of_url(endpoint)?, options)?;
        // Tries once.
        match adapter.0.live(true).await {
            Ok(_) => Ok(adapter),
            Err(Failure::Unfit(fault)) => Err(fault.into()),
            Err(failure) => Err(failure.into_error("connecting to Redis")),
        }
    }

    /// Returns an adapter over a client of yours: a `redis::Client`, a `SentinelClient` or a `ClusterClient`.
    ///
    /// The first call connects. A server that may not be used refuses every call with
    /// [`StoreErrorKind::Refused`](crate::StoreErrorKind::Refused).
    #[must_use]
    pub fn new(client: impl Into<RedisClient>) -> Self {
        Self(Slot::new(client.into(), RedisOptions::new()))
    }

    /// Returns an adapter over a client of yours, with these options.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config) for an option that is not valid.
    pub fn with_options(
        client: impl Into<RedisClient>,
        options: RedisOptions,
    ) -> Result<Self, StoreError> {
        Ok(Self(Slot::new(client.into(), options.checked()?)))
    }

    /// Sends a command without a key to every primary. Returns the address and the reply of each.
    ///
    /// # Errors
    ///
    /// Those of the connection to any primary. A refusal is a reply.
    pub(crate) async fn ask_primaries(
        &self,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Vec<(String, Result<Value, StoreError>)>, StoreError> {
        let send = |live: Arc<Live>| async move { Ok(live.main.ask_all(command).await?) };
        let replies = self.0.repeat(self.0.bound(context), send).await?.into_iter();
        let error = |error| Failure::from(error).into_error(context);
        Ok(replies.map(|(address, reply)| (address, reply.map_err(error))).collect())
    }
}

impl fmt::Debug for RedisAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAdapter").field("options", &self.0.options).finish_non_exhaustive()
    }
}
