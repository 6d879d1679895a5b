//! The connections of the Redis adapter to Sentinel, to a cluster and with replicas.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::ConnectionAddr;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::ClaimReply;
use tower_dedup::adapter::{RedisAdapter, RedisOptions};

use super::redis_calls::{attempt, claim, config_error, connect, options};
use support::redis::{Cluster, SentinelSet, Server, fresh_prefix, keys_of, wait_until};
use support::terms;

const BOUND: Duration = Duration::from_secs(20);

/// Claims until a call succeeds. Each call must end within its bound.
async fn claim_again(adapter: &RedisAdapter, id: &str) {
    let (begun, terms) = (Instant::now(), terms());
    loop {
        let call = Instant::now();
        match claim(adapter, id, &terms).await {
            Ok(claimed) => {
                assert_eq!(attempt(Ok(claimed)), 1);
                return;
            }
            Err(error) => assert!(error.is_transient(), "{error:?}"),
        }
        assert!(call.elapsed() < Duration::from_secs(3), "{:?}", call.elapsed());
        assert!(begun.elapsed() < BOUND, "no recovery");
    }
}

#[tokio::test]
async fn silent_sentinel_costs_a_short_bound() {
    let set = SentinelSet::start();
    set.sentinels()[0].stop();
    set.sentinels()[1].stop();
    let begun = Instant::now();
    let adapter = connect(&set.url()).await;
    // `redis` asks three at once, and takes up to 1.5 s for each.
    assert!(begun.elapsed() < Duration::from_millis(2_500), "{:?}", begun.elapsed());
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
    set.sentinels()[0].cont();
    set.sentinels()[1].cont();
}

/// Claims events until the new master has one of them.
#[tokio::test]
async fn durable_call_leaves_a_master_that_is_cut_off_from_the_others() {
    let set = SentinelSet::start_linked(&[]);
    let prefix = fresh_prefix();
    let options = RedisOptions::new().prefix(&prefix).wait_replicas(1, Duration::from_millis(500));
    let adapter = RedisAdapter::connect_with(&set.url(), options).await.unwrap();
    claim_again(&adapter, "a").await;
    // The old master still takes the writes of its clients.
    set.cut_from_peers(0);
    let new = set.failover_from(0).await;
    let begun = Instant::now();
    for number in 0.. {
        let id = format!("b{number}");
        claim_again(&adapter, &id).await;
        let mut server = set.servers()[new].connection().unwrap();
        let key = format!("{prefix}:test:{id}").into_bytes();
        if keys_of(&mut server, &prefix).unwrap().contains(&key) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "calls stay on the old master");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    set.heal(0);
}

#[tokio::test]
async fn sentinels_have_a_password_of_their_own() {
    let set = SentinelSet::start();
    for sentinel in set.sentinels() {
        sentinel.run::<()>(&["ACL", "SETUSER", "app", "on", ">secret", "+@all", "allchannels"]);
        sentinel.run::<()>(&["ACL", "SETUSER", "default", "off"]);
    }
    let error = RedisAdapter::connect_with(&set.url(), options()).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    let nodes = set.sentinels().iter();
    let nodes = nodes.map(|node| ConnectionAddr::Tcp("127.0.0.1".to_owned(), node.port()));
    let master = SentinelServerType::Master;
    let client = SentinelClientBuilder::new(nodes, set.name(), master)
        .unwrap()
        .set_client_to_sentinel_username("app")
        .set_client_to_sentinel_password("secret")
        .build()
        .unwrap();
    let adapter = RedisAdapter::with_options(client, options());
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
}

#[tokio::test]
async fn sentinel_behind_the_scheme_of_a_server_names_the_scheme() {
    let set = SentinelSet::start();
    let url = format!("redis://{}", set.sentinels()[0].address());
    let error = RedisAdapter::connect(&url).await.unwrap_err();
    assert!(config_error(&error).to_string().ends_with("use the scheme `redis+sentinel`"));
}

/// Returns an adapter, and what returns an id whose key is in a slot.
async fn in_slots(cluster: &Cluster) -> (Arc<RedisAdapter>, impl Fn(&str, u16) -> String + use<>) {
    let prefix = fresh_prefix();
    let options = RedisOptions::new().prefix(&prefix);
    let adapter = RedisAdapter::connect_with(&cluster.url(), options).await.unwrap();
    let id = move |start: &str, slot| Cluster::id_in_slot(&prefix, start, slot);
    (Arc::new(adapter), id)
}

/// A primary and its replica hang, so nobody takes their slots over.
#[tokio::test]
async fn process_that_starts_while_a_primary_of_a_cluster_hangs_serves_the_others() {
    let cluster = Cluster::start();
    for node in cluster.nodes() {
        node.run::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    let mut of_others = Vec::new();
    for tag in ["{a}", "{b}", "{c}", "{d}", "{e}", "{f}"] {
        if cluster.primary_of(tag).await != 0 {
            of_others.push(cluster.slot_of(tag));
        }
    }
    let hanging = [0, 3].map(|node| &cluster.nodes()[node]);
    hanging.iter().for_each(|node| node.stop());
    let (adapter, id) = in_slots(&cluster).await;
    assert!(of_others.len() > 1);
    for slot in of_others {
        claim_again(&adapter, &id("beside", slot)).await;
    }
    let other = &cluster.nodes()[1];
    other.run::<()>(&["CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru"]);
    let evicts = RedisAdapter::connect(&cluster.url()).await.unwrap_err();
    assert_eq!(evicts.kind(), StoreErrorKind::Config, "the others are checked");
    other.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    cluster.nodes()[..3].iter().for_each(Server::stop);
    let hang = RedisAdapter::connect(&cluster.url()).await.unwrap_err();
    assert!(hang.is_transient(), "{hang:?}");
    cluster.nodes()[..4].iter().for_each(Server::cont);
    for node in cluster.nodes() {
        node.run::<()>(&["ACL", "SETUSER", "default", "-eval"]);
    }
    let lacks = RedisAdapter::connect(&cluster.url()).await.unwrap_err();
    assert_eq!(lacks.kind(), StoreErrorKind::Refused, "{lacks:?}");
}

/// Starts a primary and a replica that follows it.
async fn pair() -> (Server, Server) {
    let primary = Server::start();
    let replica = Server::start_with(&[&format!("replicaof 127.0.0.1 {}", primary.port())]);
    // A replica is online before it acknowledges its first write.
    wait_until("a replica", || {
        let mut connection = primary.connection().unwrap();
        redis::cmd("SET").arg("a").arg(1).query::<()>(&mut connection).unwrap();
        let wait = redis::cmd("WAIT").arg(1).arg(1_000).query::<u32>(&mut connection);
        (wait.unwrap() == 1).then_some(())
    })
    .await;
    (primary, replica)
}

/// A node of a cluster may take longer than the response timeout, because it waits.
#[tokio::test]
async fn claim_in_a_cluster_waits_for_replicas_as_long_as_it_may() {
    let cluster = Cluster::start();
    let options = RedisOptions::new().call_timeout(2 * BOUND).response_timeout(BOUND / 40);
    let options = options.wait_replicas(1, BOUND);
    let adapter = RedisAdapter::connect_with(&cluster.url(), options).await.unwrap();
    claim(&adapter, "warm", &terms()).await.unwrap();
    cluster.nodes()[3..].iter().for_each(Server::stop);
    let (begun, terms) = (Instant::now(), terms());
    let (claimed, ()) = tokio::join!(claim(&adapter, "a", &terms), async {
        tokio::time::sleep(BOUND / 20).await;
        cluster.nodes()[3..].iter().for_each(Server::cont);
    });
    assert_eq!(attempt(claimed), 1);
    assert!(begun.elapsed() < BOUND / 4, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn write_that_no_replica_has_stays_unknown_on_another_connection_too() {
    let (primary, replica) = pair().await;
    let options = options().wait_replicas(1, Duration::from_millis(200));
    let adapter = RedisAdapter::connect_with(&primary.url(), options).await.unwrap();
    // On a busy machine, a replica that runs may answer too late.
    claim_until_durable(&adapter, "warm", &terms()).await.unwrap();
    replica.stop();
    let terms = terms();
    for _ in 0..3 {
        let error = claim(&adapter, "a", &terms).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        // A `WAIT` without a write of its own connection would count the silent replica.
        let _ = primary.ask::<()>(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
    replica.cont();
    let durable = claim_until_durable(&adapter, "a", &terms).await;
    assert_eq!(attempt(durable), 1);
}

async fn claim_until_durable(
    adapter: &RedisAdapter,
    id: &str,
    terms: &tower_dedup::adapter::contract::CallTerms,
) -> Result<ClaimReply, tower_dedup::StoreError> {
    let begun = Instant::now();
    loop {
        let claimed = claim(adapter, id, terms).await;
        if claimed.is_ok() || begun.elapsed() > BOUND {
            return claimed;
        }
    }
}
