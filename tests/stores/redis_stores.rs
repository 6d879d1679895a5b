//! The stores of Redis for the conformance suite: a prefix of its own on each topology.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tower_dedup::DedupKey;
use tower_dedup::adapter::{RedisAdapter, RedisOptions};
use tower_dedup::conformance::{RemoteStore, SharedStore, Store};

use crate::support::redis::{
    Cluster, SentinelSet, Server, command, connection, fresh_prefix, shared, shared_database,
    with_prefix,
};
use crate::support::time_travel::{milliseconds, shift_redis};

pub(crate) trait Topology: Send + Sync + 'static {
    /// Returns the URL for the adapter.
    fn url() -> String;

    /// Returns the URLs of the servers that have the keys of an adapter with this URL.
    fn primaries(url: &str) -> Vec<String>;

    fn options() -> RedisOptions {
        patient()
    }
}

/// The bounds are not under test here, and the machine may be busy.
fn patient() -> RedisOptions {
    let bound = Duration::from_secs(10);
    RedisOptions::new().call_timeout(2 * bound).response_timeout(bound).connect_timeout(bound)
}

pub(crate) struct OnServer;

impl Topology for OnServer {
    fn url() -> String {
        shared_database()
    }

    fn primaries(url: &str) -> Vec<String> {
        vec![url.to_owned()]
    }
}

pub(crate) struct OnSentinel;

impl Topology for OnSentinel {
    fn url() -> String {
        SentinelSet::shared().url()
    }

    fn primaries(_: &str) -> Vec<String> {
        vec![SentinelSet::shared().servers()[0].url()]
    }
}

pub(crate) struct OnCluster;

impl Topology for OnCluster {
    fn url() -> String {
        Cluster::shared().url()
    }

    fn primaries(_: &str) -> Vec<String> {
        Cluster::shared().nodes()[..3].iter().map(Server::url).collect()
    }
}

/// Each write is on a replica too when the call returns.
pub(crate) struct OnReplicas;

impl Topology for OnReplicas {
    fn url() -> String {
        OnSentinel::url()
    }

    fn primaries(url: &str) -> Vec<String> {
        OnSentinel::primaries(url)
    }

    fn options() -> RedisOptions {
        patient().wait_replicas(1, Duration::from_secs(5))
    }
}

pub(crate) type Redis = On<OnServer>;
pub(crate) type RedisSentinel = On<OnSentinel>;
pub(crate) type RedisCluster = On<OnCluster>;
pub(crate) type RedisReplicated = On<OnReplicas>;

pub(crate) struct On<T> {
    adapter: Arc<RedisAdapter>,
    url: String,
    prefix: String,
    topology: PhantomData<T>,
}

impl<T: Topology> On<T> {
    fn shift(&self, by: i64) {
        for url in T::primaries(&self.url) {
            shift_redis(&mut connection(&url).unwrap(), &self.prefix, by);
        }
    }
}

impl<T: Topology> Store for On<T> {
    type Adapter = RedisAdapter;

    async fn create() -> Self {
        let (url, prefix) = (T::url(), fresh_prefix());
        let with_prefix = with_prefix(&url, &prefix);
        let adapter = RedisAdapter::connect_with(&with_prefix, T::options()).await.unwrap();
        Self { adapter: Arc::new(adapter), url, prefix, topology: PhantomData }
    }

    fn adapter(&self) -> Arc<RedisAdapter> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        self.shift(-milliseconds(by));
    }

    async fn set_back(&self, by: Duration) {
        self.shift(milliseconds(by));
    }

    async fn corrupt(&self, key: &DedupKey) {
        let name = format!("{}:{}:{}", self.prefix, key.namespace(), key.id());
        for url in T::primaries(&self.url) {
            let mut connection = connection(&url).unwrap();
            // The headers of `lua/prelude.lua`, of a row without a digest and an event type.
            command(&["SETRANGE", &name, "50", "x"]).exec(&mut connection).unwrap();
        }
    }
}

impl RemoteStore for Redis {
    fn server(&self) -> (String, u16) {
        let url = shared().trim_start_matches("redis://");
        let (host, port) = url.split('/').next().and_then(|url| url.rsplit_once(':')).unwrap();
        (host.to_owned(), port.parse().unwrap())
    }

    async fn connect(&self, port: u16) -> Arc<RedisAdapter> {
        let database = self.url.split('/').nth(3).unwrap_or_default();
        let url = with_prefix(&format!("redis://127.0.0.1:{port}/{database}"), &self.prefix);
        Arc::new(RedisAdapter::connect_with(&url, patient()).await.unwrap())
    }
}

impl<T: Topology> SharedStore for On<T> {
    const PROCESSES: usize = 8;

    fn address(&self) -> String {
        with_prefix(&self.url, &self.prefix)
    }

    async fn attach(address: &str) -> Arc<RedisAdapter> {
        Arc::new(RedisAdapter::connect_with(address, patient()).await.unwrap())
    }
}
