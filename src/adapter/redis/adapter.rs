//! [`RedisAdapter`]: its calls and its maintenance.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use redis::{Cmd, Value};

use super::super::contract::{Abilities, DedupAdapter, StoreFuture};
use super::super::inspect::{
    Cursor, Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Purged, Stats,
};
use super::super::replies::{ClaimReply, CompleteReply, RenewReply};
use super::super::terms::CallTerms;
use super::client::RedisClient;
use super::key_names::KeyNames;
use super::options::RedisOptions;
use super::slot::Slot;
use super::url::Endpoint;
use crate::error::Error;
use crate::key::DedupKey;

/// Keeps keys in Redis or Valkey: one server, Sentinel, or Cluster.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_dedup::Error> {
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
pub struct RedisAdapter(Arc<Shared>);

pub(super) struct Shared {
    pub(super) slot: Arc<Slot>,
    pub(super) names: KeyNames,
}

impl RedisAdapter {
    /// Connects to the server, the Sentinels or the cluster that a URL names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with a [`ConfigError`](crate::ConfigError) as its
    /// source, for a URL that cannot be read, and for a server that evicts keys, is older than version
    /// 6.0, or is of another kind than the URL says.
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) or
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) if the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, RedisOptions::new()).await
    }

    /// Connects with these options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and [`ErrorKind::Config`](crate::ErrorKind::Config) for an option
    /// that is not valid.
    pub async fn connect_with(url: &str, options: RedisOptions) -> Result<Self, Error> {
        let mut endpoint = Endpoint::read(url)?;
        let prefix = endpoint.prefix.take();
        let options = RedisOptions { prefix: prefix.unwrap_or(options.prefix), ..options };
        let adapter = Self::with_options(RedisClient::of_url(endpoint)?, options)?;
        adapter.0.slot.connect().await?;
        Ok(adapter)
    }

    /// Returns an adapter over a client of yours: a `redis::Client`, a `SentinelClient` or a `ClusterClient`.
    ///
    /// The first call connects. A server that may not be used refuses every call with
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused).
    #[must_use]
    pub fn new(client: impl Into<RedisClient>) -> Self {
        Self::of(client.into(), RedisOptions::new())
    }

    /// Returns an adapter over a client of yours, with these options.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) for an option that is not valid.
    pub fn with_options(
        client: impl Into<RedisClient>,
        options: RedisOptions,
    ) -> Result<Self, Error> {
        Ok(Self::of(client.into(), options.checked()?))
    }

    fn of(client: RedisClient, options: RedisOptions) -> Self {
        let names = KeyNames::new(&options.prefix);
        Self(Arc::new(Shared { slot: Slot::new(client, options), names }))
    }

    /// Sends a command without a key, such as `INFO`, to every primary, all at once. Returns the address
    /// (`host:port`) and the reply of each.
    ///
    /// # Errors
    ///
    /// A primary does not reply. A refusal is a reply.
    pub(crate) async fn ask_primaries(
        &self,
        command: &Cmd,
    ) -> Result<Vec<(String, Result<Value, Error>)>, Error> {
        self.0.slot.ask_all(command, "asking a primary").await
    }
}

impl fmt::Debug for RedisAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAdapter").field("names", &self.0.names).finish_non_exhaustive()
    }
}

/// Defines the method as a call of the scripts.
macro_rules! call {
    ($($method:ident -> $reply:ty),+) => {$(
        fn $method<'a>(
            &'a self,
            key: &'a DedupKey,
            terms: &'a CallTerms,
        ) -> StoreFuture<'a, $reply> {
            Box::pin(async move { self.0.$method(key, terms).await })
        }
    )+};
}

impl DedupAdapter for RedisAdapter {
    fn abilities(&self) -> Abilities {
        Abilities::new().with_leases().with_stored_data().with_inspection().with_expires_keys()
    }

    call!(claim -> ClaimReply, release -> (), renew -> RenewReply, complete -> CompleteReply);
}

impl MaintenanceAdapter for RedisAdapter {
    /// Deletes nothing, because Redis deletes each key by itself, `PURGE_GRACE` after it has expired.
    fn purge(&self, _limit: u32) -> StoreFuture<'_, Purged> {
        Box::pin(async move {
            let open = self.0.slot.check_open();
            open.map(|()| Purged::new(0)).map_err(|failure| failure.into_error("purging keys"))
        })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        Box::pin(async move { self.0.forget(key).await })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move { self.0.get(key).await })
    }

    /// Reads keys by `SCAN`, which visits every key of the database, those of other programs too. A call
    /// visits at most about 20,000 keys.
    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a Cursor>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        Box::pin(async move { self.0.list(filter, after, limit).await })
    }

    /// Reads up to 100,000 keys of each primary by `SCAN` and `GET`: several seconds. If a primary has
    /// more keys, those of other programs included, the numbers are estimated by its `DBSIZE`. The size in
    /// bytes is not known.
    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move { self.0.stats().await })
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move { self.0.slot.close() })
    }
}
