//! The checks of a Redis store.

use std::time::Duration;

use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{ListFilter, MaintenanceAdapter};
use tower_dedup::internals::{ask_primaries, in_one_line};
use tower_dedup::redis::{Cmd, InfoDict, cmd, from_redis_value};
use tower_dedup::{DedupKey, StoreError};

use super::finding::Finding;
use crate::failure::{Failure, within};
use crate::store::Redis;

/// How many keys are claimed and released again, so that each primary of a cluster gets some.
const KEYS: u32 = 16;
/// The namespace of these keys.
const NAMESPACE: &str = "tower-dedup.doctor";
/// How long these keys are remembered if their release fails.
const RETENTION: Duration = Duration::from_secs(60);

pub(super) async fn findings(redis: &Redis) -> Result<Vec<Finding>, Failure> {
    let adapter = redis.open().await?;
    let checks = async { Ok(checks(&redis.url, &adapter).await?) };
    let findings = within(redis.timeout * 6, "checking the server", checks).await;
    let _ = tokio::time::timeout(redis.timeout, adapter.close()).await;
    findings
}

async fn checks(url: &str, adapter: &RedisAdapter) -> Result<Vec<Finding>, StoreError> {
    let scheme = url.split(':').next().unwrap_or_default();
    let replies = ask_primaries(adapter, &cmd("INFO")).await?;
    let is_local = replies.iter().all(|(address, _)| is_local(address));
    let mut findings = vec![tls(scheme, is_local)];
    let mut asked = Ok(());
    for (at, info) in replies {
        match info {
            Ok(info) => {
                let info = from_redis_value(info).unwrap_or_else(|_| InfoDict::new(""));
                findings.push(memory(&at, &info));
                findings.push(durability(&at, &info, scheme.ends_with("+sentinel")));
            }
            Err(error) => asked = Err(error),
        }
    }
    findings.push(rights(adapter, asked).await);
    Ok(findings)
}

fn is_local(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.starts_with('/')
        || host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn tls(scheme: &str, is_local: bool) -> Finding {
    let is_encrypted = scheme.starts_with("rediss") || scheme.starts_with("valkeys");
    let local = "none, and the server is on this machine";
    Finding::ok("tls", if is_encrypted { "encrypted" } else { local }).warning(
        (!is_encrypted && !is_local).then_some("another machine, and no TLS"),
        "use rediss:// (rediss+sentinel://, rediss+cluster://)",
    )
}

fn memory(at: &str, info: &InfoDict) -> Finding {
    let number = |name| info.get::<u64>(name).unwrap_or_default();
    let text = |name| info.get::<String>(name).unwrap_or_default();
    let (used, max) = (number("used_memory"), number("maxmemory"));
    let (used_text, policy) = (text("used_memory_human"), text("maxmemory_policy"));
    let found = match max {
        0 => format!("{at}: {used_text} used, maxmemory is not set"),
        _ => format!("{at}: {used_text} of {} used, {policy}", text("maxmemory_human")),
    };
    Finding::ok("memory", &*found)
        .error(
            (max > 0 && !["", "noeviction"].contains(&&*policy)).then_some(&*found),
            "set maxmemory-policy noeviction: an event whose key is evicted runs again",
        )
        .warning(
            (max > 0 && policy.is_empty()).then(|| format!("{at}: INFO hides maxmemory-policy")),
            "see in the settings of the service that it is noeviction",
        )
        .warning(
            (max > 0 && used >= max / 5 * 4).then_some(&*found),
            "raise maxmemory or shorten the retention: a full server refuses new events with 503",
        )
}

fn durability(at: &str, info: &InfoDict, is_sentinel: bool) -> Finding {
    let lacks_file = info.get("aof_enabled") != Some(1);
    let lacks_replicas = is_sentinel && !info.contains_key(&"min_slaves_good_slaves");
    Finding::ok("durability", format!("{at}: append-only file"))
        .warning(
            lacks_file.then(|| format!("{at}: there is no append-only file")),
            "set appendonly yes: a restart loses the keys since the last snapshot, and a primary that \
             restarts empty empties its replicas",
        )
        .warning(
            lacks_replicas.then(|| format!("{at}: min-replicas-to-write is 0")),
            "set min-replicas-to-write 1 and min-replicas-max-lag 10: a primary that is cut off from \
             its replicas then refuses claims",
        )
}

/// Tries what the service needs, and so also finds a replica, or a server that cannot write. `info` is whether `INFO`
/// was permitted.
async fn rights(adapter: &RedisAdapter, info: Result<(), StoreError>) -> Finding {
    let claim = claim(adapter).await;
    let eval = ask(adapter, cmd("EVAL").arg("return 1").arg(0)).await;
    let wait = ask(adapter, cmd("WAIT").arg(0).arg(0)).await;
    let list = adapter.list(&ListFilter::default(), None, 1).await.map(drop);
    let list = list.and(ask(adapter, &cmd("DBSIZE")).await);
    let fails = |what: &str, tried: Result<(), StoreError>| {
        tried.err().map(|error| format!("{what} fails: {}", in_one_line(&error)))
    };
    Finding::ok("rights", "claims, releases, lists and INFO are permitted")
        .error(
            fails("a claim", claim),
            "name a primary that takes writes, and grant the rights of the guide's page `redis`",
        )
        .error(
            fails("EVAL", eval),
            "grant +eval: after a restart of the server no claim works without it",
        )
        .warning(fails("INFO", info), "grant +info: memory and durability are not checked")
        .warning(
            fails("WAIT", wait),
            "grant +wait: a failover may lose releases of the on-arrival ledger, and so events",
        )
        .warning(fails("a list", list), "grant +scan and +dbsize for `list` and `stats`")
}

/// Claims keys as the on-arrival ledger does, finds them as duplicates, reads and releases them. Their rows are expired
/// then, and stay for an hour.
async fn claim(adapter: &RedisAdapter) -> Result<(), StoreError> {
    let run = rand::random::<u64>();
    let [terms, again] = [(); 2].map(|()| CallTerms::on_claim(Token::random(), RETENTION));
    for n in 0..KEYS {
        let key = DedupKey::new(NAMESPACE, &format!("{run:016x}-{n:02}")).expect("a key");
        adapter.claim(&key, &terms).await?;
        let (duplicate, read) = (adapter.claim(&key, &again).await, adapter.get(&key).await);
        adapter.release(&key, &terms).await?;
        duplicate?;
        read?;
    }
    Ok(())
}

/// Sends a command to every primary, each of which may refuse it.
async fn ask(adapter: &RedisAdapter, command: &Cmd) -> Result<(), StoreError> {
    let replies = ask_primaries(adapter, command).await?;
    replies.into_iter().try_for_each(|(_, reply)| reply.map(drop))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level::{Error, Ok as Fine, Warning};
    use super::*;

    #[test]
    fn policy_that_info_hides_is_no_eviction() {
        for (info, level) in [
            ("maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", Fine),
            ("maxmemory:9\r\nused_memory:1\r\nmaxmemory_policy:noeviction\r\n", Fine),
            ("maxmemory:9\r\nused_memory:8\r\nmaxmemory_policy:noeviction\r\n", Warning),
            ("maxmemory:9\r\nused_memory:1\r\nmaxmemory_policy:volatile-lru\r\n", Error),
            ("maxmemory:9\r\nused_memory:1\r\n", Warning),
        ] {
            assert_eq!(memory("db:6379", &InfoDict::new(info)).level, level, "{info}");
        }
    }
}
