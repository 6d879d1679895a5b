//! [`Cluster`]: the primaries of a cluster, and the slots that each holds.
//!
//! Not the cluster client of `redis`, because that client sends `ASKING` apart from its command, asks no
//! server whether it may be used, and holds up all calls while it asks a silent server for the slots.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use rand::seq::SliceRandom;
use redis::{Cmd, ErrorKind, RedisConnectionInfo, RedisError, Value};

use super::super::errors::code;
use super::super::options::RedisOptions;
use super::super::url::{Address, Endpoint};
use super::failure::{Failure, is_of_the_connection};
use super::link::Target;
use super::node::{Node, Sent};
use super::single::Single;
use super::slots::{Shards, SlotMap, slot};
use super::target::{client, longest_step};
use crate::error::{ConfigError, Error};

/// How many redirections one attempt follows.
const MOST_REDIRECTIONS: usize = 5;
/// How many nodes are asked for the slots at once.
const ASKED_AT_ONCE: usize = 3;
/// How many times so many nodes may be silent while a map is read.
const MOST_GROUPS: u32 = 5;
/// A map of this age is read anew when the primaries are asked for.
const MAP_HOLDS: Duration = Duration::from_secs(2);

/// A cluster.
pub(super) struct Cluster {
    tls: bool,
    redis: RedisConnectionInfo,
    options: RedisOptions,
    seeds: Vec<Address>,
    maps: Arc<Single<Map>>,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    /// The nodes of the last map, each with whether it is a primary. Replicas too can name the slots.
    known: Mutex<Vec<(Address, bool)>>,
}

struct Map {
    slots: SlotMap,
    read_at: Instant,
}

impl Cluster {
    pub(super) fn new(
        endpoint: &Endpoint,
        redis: RedisConnectionInfo,
        options: &RedisOptions,
    ) -> Result<Arc<Self>, Error> {
        let cluster = Self {
            tls: endpoint.tls,
            redis,
            options: options.clone(),
            seeds: endpoint.addresses.clone(),
            maps: Single::new(MOST_GROUPS * longest_step(options)),
            nodes: Mutex::default(),
            known: Mutex::default(),
        };
        // An address or a certificate that cannot be used is found here.
        for seed in &cluster.seeds {
            client(seed, cluster.tls, cluster.redis.clone(), options)?;
        }
        Ok(Arc::new(cluster))
    }

    /// Connects to every primary. Returns why one may not be used. A primary that cannot be reached is
    /// left out, because the others can do their part.
    pub(super) async fn connect(self: &Arc<Self>) -> Result<Option<ConfigError>, Failure> {
        let primaries = match self.primaries().await {
            Err(Failure::Unfit(fault)) => return Ok(Some(fault)),
            primaries => primaries?,
        };
        let nodes = primaries.iter().map(|address| self.node(address));
        let links = nodes.map(|node| async { Ok::<_, Failure>(node?.link.live().await?.fault()) });
        let mut last = None;
        let mut is_reached = false;
        for connected in join_all(links).await {
            match connected {
                Ok(Some(fault)) => return Ok(Some(fault)),
                Ok(None) => is_reached = true,
                Err(failure) => last = Some(failure),
            }
        }
        match last {
            Some(failure) if !is_reached => Err(failure),
            _ => Ok(None),
        }
    }

    /// Asks every primary again whether it may be used.
    pub(super) async fn check(self: &Arc<Self>) -> Result<(), Failure> {
        let primaries = self.primaries().await?;
        let nodes = primaries.iter().map(|address| self.node(address));
        let checks = nodes.map(|node| async { node?.check().await });
        join_all(checks).await.into_iter().collect()
    }

    /// Runs a script, or sends a command, on the primary of this key. Follows redirections.
    pub(super) async fn send(
        self: &Arc<Self>,
        key: &[u8],
        sent: Sent<'_>,
    ) -> Result<Value, Failure> {
        let slot = slot(key);
        let map = self.map().await?;
        let Some(owner) = map.slots.owner(slot) else {
            self.renew(&map);
            let error = (ErrorKind::ClusterConnectionNotFound, "no primary holds the slot");
            return Err(RedisError::from(error).into());
        };
        let (mut address, mut asking) = (owner.clone(), false);
        for _ in 0..MOST_REDIRECTIONS {
            let node = self.node(&address)?;
            let error = match node.send(sent, asking).await {
                Err(Failure::Redis(error)) => error,
                reply => return reply,
            };
            let next = error.redirect_node().and_then(|(named, _)| address.named_by(named));
            match (code(&error), next) {
                (Some("ASK"), Some(next)) => (address, asking) = (next, true),
                (Some("MOVED"), Some(next)) => {
                    self.renew(&map);
                    (address, asking) = (next, false);
                }
                _ => {
                    if suggests_a_new_map(&error) {
                        self.renew(&map);
                    }
                    return Err(error.into());
                }
            }
        }
        let error = (ErrorKind::ClusterConnectionNotFound, "the nodes redirect in a circle");
        Err(RedisError::from(error).into())
    }

    /// Returns the primaries that hold slots.
    pub(super) async fn primaries(self: &Arc<Self>) -> Result<Vec<Address>, Failure> {
        Ok(self.shards().await?.into_iter().map(|(primary, _)| primary).collect())
    }

    /// Returns the primaries that hold slots, with their slots.
    pub(super) async fn shards(self: &Arc<Self>) -> Result<Shards, Failure> {
        let map = self.map().await?;
        if map.read_at.elapsed() >= MAP_HOLDS {
            self.renew(&map);
        }
        Ok(map.slots.shards())
    }

    /// Returns the node at this address.
    pub(super) fn node(&self, address: &Address) -> Result<Arc<Node>, Failure> {
        let mut nodes = lock(&self.nodes);
        if self.maps.is_closed() {
            return Err(Failure::Closed);
        }
        if let Some(node) = nodes.get(address) {
            return Ok(Arc::clone(node));
        }
        let client = client(address, self.tls, self.redis.clone(), &self.options);
        let client = client.map_err(|_| {
            RedisError::from((ErrorKind::InvalidClientConfig, "the node has no valid address"))
        })?;
        let (client, address) = (client.into(), address.clone());
        let target = Target::Server { client, address: address.clone(), in_cluster: true };
        let node = Arc::new(Node::new(&target, &self.options));
        nodes.insert(address, Arc::clone(&node));
        Ok(node)
    }

    pub(super) fn close(&self) {
        self.maps.close();
        for (_, node) in lock(&self.nodes).drain() {
            node.close();
        }
    }

    async fn map(self: &Arc<Self>) -> Result<Arc<Map>, Failure> {
        let cluster = Arc::clone(self);
        self.maps.get(move || async move { cluster.read_map().await }).await
    }

    fn renew(self: &Arc<Self>, old: &Arc<Map>) {
        let cluster = Arc::clone(self);
        self.maps.renew(old, move || async move { cluster.read_map().await });
    }

    /// Asks the nodes for the slots, a few at a time, until one replies. Ends by itself, because each
    /// question has a timeout.
    async fn read_map(self: Arc<Self>) -> Result<Map, Failure> {
        let mut asked = HashSet::new();
        let known = lock(&self.known).clone();
        let mut candidates: Vec<_> = known.into_iter().map(|(address, _)| address).collect();
        candidates.shuffle(&mut rand::rng());
        candidates.extend(self.seeds.iter().cloned());
        candidates.retain(|address| asked.insert(address.clone()));
        let mut replies = stream::iter(candidates)
            .map(|address| {
                let cluster = &self;
                async move { cluster.slots_of(&address).await }
            })
            .buffer_unordered(ASKED_AT_ONCE);
        let mut last = Failure::Interrupted;
        while let Some(reply) = replies.next().await {
            match reply {
                Ok(slots) => {
                    self.keep(&slots);
                    return Ok(Map { slots, read_at: Instant::now() });
                }
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    async fn slots_of(&self, address: &Address) -> Result<SlotMap, Failure> {
        let mut command = Cmd::new();
        command.arg("CLUSTER").arg("SLOTS");
        let reply = match self.node(address)?.send(Sent::Command(&command), false).await {
            Err(Failure::Redis(error)) if is_no_cluster(&error) => {
                return Err(Failure::Unfit(ConfigError::WrongRedisScheme { scheme: "redis" }));
            }
            reply => reply?,
        };
        let slots = SlotMap::read(reply, address);
        let error = (ErrorKind::UnexpectedReturnType, "the node holds no map of the slots");
        slots.ok_or_else(|| RedisError::from(error).into())
    }

    /// Drops the nodes that have left the cluster.
    fn keep(&self, slots: &SlotMap) {
        let primaries: HashSet<_> = slots.primaries().into_iter().collect();
        let all = slots.nodes();
        lock(&self.nodes).retain(|address, _| all.contains(address));
        let known = all.into_iter().map(|address| {
            let is_primary = primaries.contains(&address);
            (address, is_primary)
        });
        let old = std::mem::replace(&mut *lock(&self.known), known.collect());
        // The primary before a promoted replica had a replica: this one.
        for (address, was_primary) in old {
            if !was_primary
                && primaries.contains(&address)
                && let Ok(node) = self.node(&address)
            {
                node.link.replicas_seen().note();
            }
        }
    }
}

fn is_no_cluster(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("cluster support disabled"))
}

fn suggests_a_new_map(error: &RedisError) -> bool {
    let codes = ["CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING", "MOVED"];
    is_of_the_connection(error) || code(error).is_some_and(|code| codes.contains(&code))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Address {
        Address { host: "127.0.0.1".to_owned(), port }
    }

    /// Returns the map of a cluster of one primary and one replica.
    fn map(primary: u16, replica: u16) -> SlotMap {
        let node = |port: u16| {
            let host = Value::BulkString(b"127.0.0.1".to_vec());
            Value::Array(vec![host, Value::Int(port.into())])
        };
        let range = vec![Value::Int(0), Value::Int(16_383), node(primary), node(replica)];
        SlotMap::read(Value::Array(vec![Value::Array(range)]), &at(primary)).unwrap()
    }

    #[test]
    fn release_waits_for_a_replica_after_a_failover() {
        let endpoint = Endpoint::read("redis+cluster://127.0.0.1:1").unwrap();
        let options = RedisOptions::new();
        let cluster = Cluster::new(&endpoint, RedisConnectionInfo::default(), &options).unwrap();
        let wanted = |port| cluster.node(&at(port)).unwrap().link.replicas_seen().wanted(0);
        cluster.keep(&map(1, 2));
        assert_eq!((wanted(1), wanted(2)), (0, 0));
        let replica = cluster.node(&at(2)).unwrap();
        cluster.keep(&map(1, 2));
        assert!(Arc::ptr_eq(&replica, &cluster.node(&at(2)).unwrap()));
        cluster.keep(&map(2, 1));
        assert_eq!((wanted(1), wanted(2)), (0, 1));
    }
}
