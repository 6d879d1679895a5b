//! The checks of a Redis store.

use std::collections::BTreeMap;
use std::time::Duration;

use tower_dedup::adapter::{
    CallTerms, DedupAdapter, ListFilter, MaintenanceAdapter, RedisAdapter, Token,
};
use tower_dedup::redis::{Cmd, Value, cmd};
use tower_dedup::{DedupKey, Error};

use super::finding::Finding;
use super::finding::Level::{self, Warning};
use crate::failure::{Failure, in_one_line, within};
use crate::output::bytes;
use crate::store::Redis;

/// How many keys are claimed and released again, so that each primary of a cluster gets some.
const KEYS: u32 = 16;
/// The namespace of these keys.
const NAMESPACE: &str = "tower-dedup.doctor";
/// How long these keys are remembered if their release fails.
const RETENTION: Duration = Duration::from_secs(60);

/// A reply with lines of the form `name:value`.
type Fields = BTreeMap<String, String>;

pub(super) async fn findings(redis: &Redis) -> Result<Vec<Finding>, Failure> {
    let adapter = redis.connect().await?;
    let work = async { Ok(checks(redis, &adapter).await?) };
    let findings = within(redis.timeout * 6, work).await;
    // What was read stands.
    let _ = tokio::time::timeout(redis.timeout, adapter.close()).await;
    findings
}

async fn checks(redis: &Redis, adapter: &RedisAdapter) -> Result<Vec<Finding>, Error> {
    let (server, topology) = redis.scheme();
    let replies = adapter.ask_primaries(&cmd("INFO")).await?;
    let is_local = replies.iter().all(|(address, _)| is_local(address));
    let is_encrypted = matches!(server, "rediss" | "valkeys");
    let ok = if is_encrypted { "encrypted" } else { "none, and the server is on this machine" };
    let faults = [(
        !is_encrypted && !is_local,
        Warning,
        "another machine, and no TLS",
        "use rediss:// (rediss+sentinel://, rediss+cluster://)",
    )];
    let mut findings = vec![Finding::first("tls", ok, &faults)];
    let mut info_error = Ok(());
    for (at, info) in &replies {
        match info {
            Ok(info) => {
                let info = fields(info);
                findings.extend([
                    primary(at, &info),
                    memory(at, &info),
                    durability(at, &info, topology == "sentinel"),
                ]);
            }
            Err(error) => info_error = Err(in_one_line(error)),
        }
    }
    findings.push(rights(adapter, info_error).await);
    Ok(findings)
}

fn is_local(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.starts_with('/')
        || host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn field<'a>(fields: &'a Fields, name: &str) -> &'a str {
    fields.get(name).map_or("", String::as_str)
}

fn primary(at: &str, info: &Fields) -> Finding {
    let replica = format!("{at}: the server is a replica");
    let loading = format!("{at}: the server is loading its data");
    let faults = [
        (
            field(info, "role") != "master",
            Level::Error,
            &*replica,
            "name the primary, or use redis+sentinel:// or redis+cluster://",
        ),
        (
            field(info, "loading") == "1",
            Level::Error,
            &loading,
            "wait: claims get 503 until it has loaded",
        ),
    ];
    Finding::first("primary", format!("{at}: the server is a primary"), &faults)
}

fn memory(at: &str, info: &Fields) -> Finding {
    let number = |name| field(info, name).parse::<u64>().unwrap_or_default();
    let (used, max) = (number("used_memory"), number("maxmemory"));
    let policy = field(info, "maxmemory_policy");
    let found = match max {
        0 => format!("{at}: {} used, maxmemory is not set", bytes(used)),
        max => format!("{at}: {} of {} used, {policy}", bytes(used), bytes(max)),
    };
    let faults = [
        (
            max > 0 && policy != "noeviction",
            Level::Error,
            &*found,
            "set maxmemory-policy noeviction: an event whose key is evicted runs again",
        ),
        (
            max > 0 && used >= max / 5 * 4,
            Warning,
            &found,
            "raise maxmemory or shorten the retention: a full server refuses new events with 503",
        ),
    ];
    Finding::first("memory", &*found, &faults)
}

fn durability(at: &str, info: &Fields, is_sentinel: bool) -> Finding {
    let failed =
        |name: &str| info.get(name).is_some_and(|status| !status.is_empty() && status != "ok");
    let failed = failed("aof_last_write_status") || failed("rdb_last_bgsave_status");
    let text = |fact: &str| format!("{at}: {fact}");
    let texts = [
        text("the last write to the disk failed"),
        text("there is no append-only file"),
        text("min-replicas-to-write is 0"),
    ];
    let faults = [
        (
            failed,
            Level::Error,
            &*texts[0],
            "see the server's log: it refuses writes until it can write to its disk",
        ),
        (
            field(info, "aof_enabled") != "1",
            Warning,
            &texts[1],
            "set appendonly yes: a restart loses the keys since the last snapshot, and a primary that \
             restarts empty empties its replicas",
        ),
        (
            is_sentinel && !info.contains_key("min_slaves_good_slaves"),
            Warning,
            &texts[2],
            "set min-replicas-to-write 1 and min-replicas-max-lag 10: a primary that is cut off from \
             its replicas then refuses claims",
        ),
    ];
    Finding::first("durability", text("append-only file"), &faults)
}

/// Tries what the service needs. Leaves expired rows behind, for an hour.
async fn rights(adapter: &RedisAdapter, info: Result<(), String>) -> Finding {
    let mut eval = cmd("EVAL");
    eval.arg("return 1").arg(0);
    let mut wait = cmd("WAIT");
    wait.arg(0).arg(0);
    let (claim, list) = claim_and_list(adapter).await;
    let list = match list {
        Ok(()) => ask(adapter, &cmd("DBSIZE")).await,
        Err(error) => Err(in_one_line(&error)),
    };
    let tried = [
        (
            "a claim",
            shown(claim),
            Level::Error,
            "see this error; the guide's page `redis` lists the rights",
        ),
        (
            "EVAL",
            ask(adapter, &eval).await,
            Level::Error,
            "grant +eval: after a restart of the server no claim works without it",
        ),
        ("INFO", info, Warning, "grant +info: memory and durability are not checked"),
        (
            "WAIT",
            ask(adapter, &wait).await,
            Warning,
            "grant +wait: a failover may lose releases of the on-arrival ledger, and so events",
        ),
        ("a list", list, Warning, "grant +scan and +dbsize for `list` and `stats`"),
    ];
    let told = |what: &str, tried: &Result<(), String>| match tried {
        Err(error) => format!("{what} fails: {error}"),
        Ok(()) => String::new(),
    };
    let texts = tried.each_ref().map(|(what, tried, ..)| told(what, tried));
    let faults = tried.iter().zip(&texts);
    let faults =
        faults.map(|((_, tried, level, advice), text)| (tried.is_err(), *level, &**text, *advice));
    let ok = "claims, releases, lists and INFO are permitted";
    Finding::first("rights", ok, &faults.collect::<Vec<_>>())
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

fn fields(value: &Value) -> Fields {
    let lines = text(value).unwrap_or_default();
    let fields = lines.lines().filter_map(|line| line.trim_end().split_once(':'));
    fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Claims keys as the on-arrival ledger does, reads one, lists them, and releases them, after which they are expired.
async fn claim_and_list(adapter: &RedisAdapter) -> (Result<(), Error>, Result<(), Error>) {
    let run = rand::random::<u64>();
    let key = |n| DedupKey::new(NAMESPACE, &format!("{run:016x}-{n:02}")).expect("a key");
    let keys: Vec<_> = (0..KEYS).map(key).collect();
    let terms = CallTerms::on_claim(Token::random(), RETENTION);
    let claimed = async {
        for key in &keys {
            adapter.claim(key, &terms).await?;
        }
        adapter.get(&keys[0]).await
    };
    let claimed = claimed.await.map(drop);
    let filter = ListFilter::new().with_namespace(NAMESPACE);
    let listed = adapter.list(&filter, None, 1).await.map(drop);
    let released = async {
        for key in &keys {
            adapter.release(key, &terms).await?;
        }
        Ok(())
    };
    (claimed.and(released.await), listed)
}

async fn ask(adapter: &RedisAdapter, command: &Cmd) -> Result<(), String> {
    let replies = shown(adapter.ask_primaries(command).await)?;
    replies.into_iter().try_for_each(|(_, reply)| shown(reply.map(drop)))
}

fn shown<T>(result: Result<T, Error>) -> Result<T, String> {
    result.map_err(|error| in_one_line(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_from_the_lines_of_info() {
        let reply = "# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\r\n";
        let fields = fields(&Value::BulkString(reply.into()));
        assert_eq!(fields.len(), 2);
        assert_eq!(fields["maxmemory_policy"], "noeviction");
    }
}
