//! The facts of a Redis store.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tower_dedup::adapter::{
    CallTerms, DedupAdapter, ListFilter, MaintenanceAdapter, RedisAdapter, StoredLoss, Token,
};
use tower_dedup::redis::{Cmd, Value, cmd};
use tower_dedup::{DedupKey, Error};

use crate::failure::{Failure, in_one_line, within};
use crate::store::Redis;

/// How often the round trip is measured. The fastest counts.
const ROUND_TRIPS: usize = 5;
/// How many keys are claimed and released again, so that each primary of a cluster gets some.
const KEYS: u32 = 16;
/// The namespace of these keys.
const NAMESPACE: &str = "tower-dedup.doctor";
/// How long these keys are remembered if their release fails.
const RETENTION: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) topology: Topology,
    pub(super) is_encrypted: bool,
    /// How long the slowest primary took for its fastest reply.
    pub(super) round_trip: Duration,
    pub(super) primaries: Vec<Primary>,
    /// What the service does, and why the server refuses it.
    pub(super) rights: Vec<(Right, Result<(), String>)>,
    pub(super) losses: Result<Vec<StoredLoss>, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topology {
    Server,
    Sentinel,
    Cluster,
}

/// One primary, as it describes itself.
#[derive(Debug, Clone)]
pub(super) struct Primary {
    pub(super) address: String,
    /// The server's clock minus this machine's, in seconds.
    pub(super) clock_ahead: f64,
    /// The fields of `INFO`, or why the server refuses it.
    pub(super) info: Result<Fields, String>,
    /// The fields of `CLUSTER INFO`, of a server in a cluster.
    pub(super) cluster: Option<Result<Fields, String>>,
    /// `None` if the role may not read it, as on managed services.
    pub(super) appendfsync: Option<String>,
}

/// A reply with lines of the form `name:value`.
pub(super) type Fields = BTreeMap<String, String>;

/// A right that the service needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Right {
    /// Claim, complete and release: `EVALSHA`, and the commands of the scripts.
    Claim,
    /// `EVAL`, after a restart of the server or a failover.
    Eval,
    /// `INFO`.
    Info,
    /// `WAIT`, for releases under the on-arrival ledger and for `wait_replicas`.
    Wait,
    /// `SCAN`, `GETRANGE` and `DBSIZE`, for `list` and `stats`.
    List,
    /// `LRANGE`, for the losses that the service has stored.
    Losses,
}

pub(super) async fn gather(redis: &Redis) -> Result<Facts, Failure> {
    let adapter = redis.connect().await?;
    let facts = within(redis.timeout * 6, async { Ok(facts(redis, &adapter).await?) }).await;
    // What was read stands.
    let _ = tokio::time::timeout(redis.timeout, adapter.close()).await;
    facts
}

async fn facts(redis: &Redis, adapter: &RedisAdapter) -> Result<Facts, Error> {
    let (round_trip, clocks) = clocks(adapter).await?;
    let mut primaries = Vec::new();
    for (address, info) in adapter.ask_primaries(&cmd("INFO")).await? {
        let info = info.map_err(|error| in_one_line(&error)).map(|value| fields(&value));
        let clock_ahead = clocks.get(&address).copied().unwrap_or_default();
        primaries.push(Primary { address, clock_ahead, info, cluster: None, appendfsync: None });
    }
    let is = |primary: &Primary, name: &str, value: &str| {
        primary.info.as_ref().is_ok_and(|info| info.get(name).is_some_and(|is| is == value))
    };
    let mut cluster_info = cmd("CLUSTER");
    cluster_info.arg("INFO");
    if primaries.iter().any(|primary| is(primary, "cluster_enabled", "1")) {
        for (address, reply) in adapter.ask_primaries(&cluster_info).await? {
            if let Some(primary) = find(&mut primaries, &address) {
                let reply = reply.map_err(|error| in_one_line(&error));
                primary.cluster = Some(reply.map(|value| fields(&value)));
            }
        }
    }
    let mut appendfsync = cmd("CONFIG");
    appendfsync.arg("GET").arg("appendfsync");
    for (address, reply) in adapter.ask_primaries(&appendfsync).await? {
        if let Some(primary) = find(&mut primaries, &address) {
            primary.appendfsync = reply.ok().and_then(|value| second_text(&value));
        }
    }
    let (server, topology) = redis.scheme();
    let topology = match topology {
        "cluster" => Topology::Cluster,
        "sentinel" => Topology::Sentinel,
        _ => Topology::Server,
    };
    let is_encrypted = matches!(server, "rediss" | "valkeys");
    let rights = rights(adapter, &primaries).await;
    let losses = adapter.stored_losses().await.map_err(|error| in_one_line(&error));
    Ok(Facts { topology, is_encrypted, round_trip, primaries, rights, losses })
}

fn find<'a>(primaries: &'a mut [Primary], address: &str) -> Option<&'a mut Primary> {
    primaries.iter_mut().find(|primary| primary.address == address)
}

/// Returns the fastest round trip, and how far the clock of each primary is ahead by it.
async fn clocks(adapter: &RedisAdapter) -> Result<(Duration, BTreeMap<String, f64>), Error> {
    let mut best = (Duration::MAX, BTreeMap::new());
    for _ in 0..ROUND_TRIPS {
        let (wall, started) = (SystemTime::now(), Instant::now());
        let replies = adapter.ask_primaries(&cmd("TIME")).await?;
        let took = started.elapsed();
        if took >= best.0 {
            continue;
        }
        let wall = (wall.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2).as_secs_f64();
        let ahead = replies
            .into_iter()
            .filter_map(|(address, reply)| Some((address, seconds(&reply.ok()?)? - wall)));
        best = (took, ahead.collect());
    }
    Ok(best)
}

/// Reads the reply to `TIME`: seconds and microseconds.
fn seconds(time: &Value) -> Option<f64> {
    let Value::Array(parts) = time else { return None };
    let number = |value: &Value| text(value)?.parse::<f64>().ok();
    Some(number(parts.first()?)? + number(parts.get(1)?)? / 1e6)
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

/// Returns the value in the reply to `CONFIG GET`.
fn second_text(value: &Value) -> Option<String> {
    match value {
        Value::Array(parts) => parts.get(1).and_then(text),
        Value::Map(pairs) => pairs.first().and_then(|(_, value)| text(value)),
        _ => None,
    }
}

fn fields(value: &Value) -> Fields {
    let lines = text(value).unwrap_or_default();
    let fields = lines.lines().filter_map(|line| line.trim_end().split_once(':'));
    fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Tries what the service needs. Leaves no key behind.
async fn rights(adapter: &RedisAdapter, primaries: &[Primary]) -> Vec<(Right, Result<(), String>)> {
    let mut eval = cmd("EVAL");
    eval.arg("return 1").arg(0);
    let mut wait = cmd("WAIT");
    wait.arg(0).arg(0);
    let (claim, list) = claim_and_list(adapter).await;
    let list = match list {
        Ok(()) => ask(adapter, &cmd("DBSIZE")).await,
        Err(error) => Err(in_one_line(&error)),
    };
    let info = primaries.iter().map(|primary| primary.info.as_ref().map(drop));
    vec![
        (Right::Claim, shown(claim)),
        (Right::Eval, ask(adapter, &eval).await),
        (Right::Info, info.collect::<Result<(), _>>().map_err(Clone::clone)),
        (Right::Wait, ask(adapter, &wait).await),
        (Right::List, list),
        (Right::Losses, shown(adapter.stored_losses().await.map(drop))),
    ]
}

/// Claims keys as the on-arrival ledger does, reads one, lists them, and releases them, which deletes them.
async fn claim_and_list(adapter: &RedisAdapter) -> (Result<(), Error>, Result<(), Error>) {
    let run = rand::random::<u64>();
    let key = |n| DedupKey::new(NAMESPACE, &format!("{run:016x}-{n:02}")).expect("a key");
    let keys: Vec<_> = (0..KEYS).map(key).collect();
    let terms = CallTerms::on_claim(Token::random(), RETENTION);
    let claimed = async {
        adapter.claim(&keys, &terms).await?;
        adapter.get(&keys[0]).await
    };
    let claimed = claimed.await.map(drop);
    let filter = ListFilter::new().with_namespace(NAMESPACE);
    let listed = adapter.list(&filter, None, 1).await.map(drop);
    let released = adapter.release(&keys, &terms).await.map(drop);
    (claimed.and(released), listed)
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

    #[test]
    fn time_is_seconds_and_microseconds() {
        let part = |text: &str| Value::BulkString(text.into());
        assert_eq!(seconds(&Value::Array(vec![part("100"), part("250000")])), Some(100.25));
        assert_eq!(seconds(&Value::Nil), None);
    }
}
