//! [`RedisAdapter`]: its calls and its maintenance.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::{Cmd, Value};

use super::super::contract::{Abilities, DedupAdapter, MaintenanceAdapter, StoreFuture};
use super::super::inspection::{Cursor, ListFilter, Listing, Purged, Stats};
use super::super::replies::{Claimed, Completed, Entry, Forgotten, Renewed};
use super::super::terms::CallTerms;
use super::client::RedisClient;
use super::connections::Connections;
use super::key_names::KeyNames;
use super::options::RedisOptions;
use super::url::Endpoint;
use crate::error::{Error, ErrorKind};
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
/// 1. Each key is one string of Redis, `PREFIX:NAMESPACE:ID`, with a value of 44 bytes and what is stored
///    with the key. Redis deletes the string [`PURGE_GRACE`](crate::adapter::PURGE_GRACE) after the key has
///    expired.
/// 2. All times are those of the server's clock, in milliseconds. After a failover it is the clock of another
///    machine: leases and retentions move by the difference.
/// 3. A server that is restarted without persistence, flushed, or replaced in a failover may lose writes
///    that it had acknowledged. Under the lease ledger, an event of that time may run twice, and none is
///    lost. On arrival, the lost release of a claim is a lost event, unless
///    [`wait_replicas`](RedisOptions::wait_replicas) is set.
/// 4. After a release has returned, no claim and no renewal of its token has an effect, if its message arrives
///    within an hour. For this, a released or forgotten key leaves a row for an hour at least, and a claim of a
///    free row sends a second command.
///
/// # TLS
///
/// A URL with `rediss` in place of `redis` connects by TLS, with one of the TLS [features](crate#features). rustls
/// takes the cryptographic provider of the process. Before its first encrypted connection, the adapter installs that of
/// its feature for the process, **unless there is one already**. A program that is to use another provider installs it
/// first: `rustls::crypto::aws_lc_rs::default_provider().install_default()` at the beginning of `main`. With
/// `tls-rustls-no-provider`, the program must do so. So must a program that hands in a `SentinelClient` or a
/// `ClusterClient` with TLS, if its crates bring two providers: the adapter does not see that they use TLS.
///
/// # Errors
///
/// [`Refused`](ErrorKind::Refused) for a refusal of the server, such as `READONLY`, `NOPERM` or
/// `CLUSTERDOWN`; [`Full`](ErrorKind::Full) for a claim at `maxmemory`;
/// [`Corrupt`](ErrorKind::Corrupt) for a value of another format, of another program, or of another type.
/// After [`Timeout`](ErrorKind::Timeout) and [`Unavailable`](ErrorKind::Unavailable) the outcome is
/// unknown.
///
/// # Why not the transactional ledger?
///
/// The handler's writes are in another store, and no commit covers both. So this does not compile:
///
/// ```compile_fail,E0277
/// # use tower_dedup::{DedupLayer, adapter::RedisAdapter, key};
/// # async fn layer() -> Result<(), tower_dedup::Error> {
/// let redis = RedisAdapter::connect("redis://127.0.0.1").await?;
/// let dedup = DedupLayer::transactional(key::header("webhook-id").namespace("acme"), redis);
/// # Ok(())
/// # }
/// ```
///
/// # Clone
///
/// A clone is another handle to the same connections and the same state.
#[derive(Clone)]
pub struct RedisAdapter(Arc<Shared>);

pub(super) struct Shared {
    pub(super) connections: Connections,
    pub(super) names: KeyNames,
    closed: AtomicBool,
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
        let endpoint = Endpoint::read(url)?;
        let options = options.with_url(&endpoint).checked()?;
        let adapter = Self::of(RedisClient::of_url(&endpoint)?, &options);
        adapter.0.connections.connect().await?;
        Ok(adapter)
    }

    /// Returns an adapter over a client of yours: a `redis::Client`, a `SentinelClient` or a `ClusterClient`.
    ///
    /// The first call connects. A server that may not be used refuses every call with
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused).
    #[must_use]
    pub fn new(client: impl Into<RedisClient>) -> Self {
        Self::of(client.into(), &RedisOptions::new())
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
        Ok(Self::of(client.into(), &options.checked()?))
    }

    fn of(client: RedisClient, options: &RedisOptions) -> Self {
        let connections = Connections::new(client, options);
        let (names, closed) = (KeyNames::new(&options.prefix), AtomicBool::new(false));
        Self(Arc::new(Shared { connections, names, closed }))
    }

    /// Sends a command without a key, such as `INFO`, to every primary, all at once. Returns the address
    /// (`host:port`) and the reply of each.
    ///
    /// # Errors
    ///
    /// A primary does not reply. A refusal is a reply.
    pub async fn ask_primaries(
        &self,
        command: &Cmd,
    ) -> Result<Vec<(String, Result<Value, Error>)>, Error> {
        self.shared()?.connections.ask_all(command, "asking a primary").await
    }

    fn shared(&self) -> Result<&Shared, Error> {
        if self.0.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "using an adapter that was closed"));
        }
        Ok(&self.0)
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
            Box::pin(async move { self.shared()?.$method(key, terms).await })
        }
    )+};
}

impl DedupAdapter for RedisAdapter {
    fn abilities(&self) -> Abilities {
        Abilities::new().with_leases().with_stored_data().with_inspection().with_expires_keys()
    }

    call!(claim -> Claimed, release -> (), renew -> Renewed, complete -> Completed);
}

impl MaintenanceAdapter for RedisAdapter {
    /// Deletes nothing, because Redis deletes each key by itself, `PURGE_GRACE` after it has expired.
    fn purge(&self, _limit: u32) -> StoreFuture<'_, Purged> {
        Box::pin(async move { self.shared().map(|_| Purged::new(0)) })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten> {
        Box::pin(async move { self.shared()?.forget(key).await })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move { self.shared()?.get(key).await })
    }

    /// Reads keys by `SCAN`, which visits every key of the database, those of other programs too. A call
    /// visits at most about 20,000 keys.
    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a Cursor>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        Box::pin(async move { self.shared()?.list(filter, after, limit).await })
    }

    /// Reads up to 100,000 keys of each primary by `SCAN` and `GET`: several seconds. If a primary has
    /// more keys, those of other programs included, the numbers are estimated by its `DBSIZE`. The size in
    /// bytes is not known.
    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move { self.shared()?.stats().await })
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            self.0.closed.store(true, Ordering::Release);
            self.0.connections.close();
        })
    }
}
