//! The judgement of the facts of a Redis store. A pure function of the facts.

use std::time::{Duration, UNIX_EPOCH};

use tower_dedup::adapter::{LossKind, StoreLoss, StoredLoss};

use super::finding::{Finding, judge_clock};
use super::redis::{Facts, Fields, Primary, Right, Topology};
use crate::output::{bytes, utc};

const SLOW: Duration = Duration::from_millis(20);
const SLOTS: u64 = 16_384;
/// Below it, a server does not know scripts with flags.
const KNOWS_FLAGS: (u32, u32) = (7, 0);
const OLDEST: (u32, u32) = (6, 2);

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![connection(facts), tls(facts)];
    for primary in &facts.primaries {
        findings.extend(judge_primary(primary, facts.topology));
    }
    let clocks = facts.primaries.iter().map(|primary| primary.clock_ahead);
    let furthest = clocks.max_by(|a, b| a.abs().total_cmp(&b.abs()));
    findings.extend(furthest.map(judge_clock));
    findings.extend(facts.rights.iter().filter_map(right));
    if facts.rights.iter().all(|(_, tried)| tried.is_ok()) {
        findings.push(Finding::ok("rights", "claims, releases, lists and INFO are permitted"));
    }
    findings.extend(losses(&facts.losses));
    findings
}

fn connection(facts: &Facts) -> Finding {
    let count = facts.primaries.len();
    let what = match facts.topology {
        Topology::Server => "one server".to_owned(),
        Topology::Sentinel => "the master that Sentinel names".to_owned(),
        Topology::Cluster => format!("a cluster with {count} primaries"),
    };
    let ms = facts.round_trip.as_secs_f64() * 1e3;
    let found = format!("{what}; a round trip takes {ms:.2} ms");
    if facts.round_trip > SLOW {
        return Finding::warning(
            "connection",
            found,
            "run the service near the server: each delivery waits for two round trips",
        );
    }
    Finding::ok("connection", found)
}

fn tls(facts: &Facts) -> Finding {
    let is_local = |primary: &Primary| {
        let host = primary.address.rsplit_once(':').map_or(&*primary.address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host.starts_with('/')
            || host == "localhost"
            || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    };
    if facts.is_encrypted {
        return Finding::ok("tls", "the connections are encrypted");
    }
    if facts.primaries.iter().all(is_local) {
        return Finding::ok("tls", "none, and the server is on this machine");
    }
    Finding::warning(
        "tls",
        "another machine, and no TLS",
        "use rediss:// (rediss+sentinel://, rediss+cluster://)",
    )
}

fn judge_primary(primary: &Primary, topology: Topology) -> Vec<Finding> {
    let at = &primary.address;
    let mut findings = Vec::new();
    match &primary.info {
        Ok(info) => findings.extend([
            version(at, info),
            role(at, info),
            replicas(at, info, topology),
            memory(at, info),
            evicted(at, info),
            persistence(at, info, primary.appendfsync.as_deref()),
        ]),
        Err(error) => findings.push(Finding::warning(
            "server",
            format!("{at}: INFO cannot be read: {error}"),
            "grant +info: the version, eviction, persistence and losses are not checked",
        )),
    }
    findings.extend(primary.cluster.as_ref().map(|cluster| match cluster {
        Ok(cluster) => slots(at, cluster),
        Err(error) => Finding::warning(
            "cluster",
            format!("{at}: CLUSTER INFO cannot be read: {error}"),
            "grant +cluster|info to check the slots",
        ),
    }));
    findings
}

fn field<'a>(fields: &'a Fields, name: &str) -> &'a str {
    fields.get(name).map_or("", String::as_str)
}

fn number(fields: &Fields, name: &str) -> u64 {
    field(fields, name).parse().unwrap_or_default()
}

fn version(at: &str, info: &Fields) -> Finding {
    const CHECK: &str = "version";
    let text = field(info, "redis_version");
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or_default());
    let version = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let found = match info.get("valkey_version") {
        Some(valkey) => format!("{at}: Valkey {valkey}"),
        None => format!("{at}: Redis {text}"),
    };
    if version < OLDEST {
        return Finding::error(CHECK, found, "upgrade to Redis 6.2 or later, or to Valkey");
    }
    if version < KNOWS_FLAGS {
        return Finding::warning(
            CHECK,
            found,
            "upgrade to 7.0 or later: this server refuses completions too when its memory is full",
        );
    }
    Finding::ok(CHECK, found)
}

fn role(at: &str, info: &Fields) -> Finding {
    const CHECK: &str = "primary";
    if field(info, "role") != "master" {
        return Finding::error(
            CHECK,
            format!("{at}: the server is a replica"),
            "name the primary, or use redis+sentinel:// or redis+cluster://",
        );
    }
    if field(info, "loading") == "1" {
        let found = format!("{at}: the server is loading its data");
        return Finding::error(CHECK, found, "wait: claims get 503 until it has loaded");
    }
    Finding::ok(CHECK, format!("{at}: the server is a primary"))
}

fn replicas(at: &str, info: &Fields, topology: Topology) -> Finding {
    const CHECK: &str = "replicas";
    let count = number(info, "connected_slaves");
    let found = format!("{at}: {count} replica(s) connected");
    match topology {
        Topology::Server => Finding::ok(CHECK, found),
        _ if count == 0 => Finding::warning(
            CHECK,
            found,
            "start a replica: without one, the loss of this machine loses the keys",
        ),
        Topology::Sentinel if !info.contains_key("min_slaves_good_slaves") => Finding::warning(
            CHECK,
            format!("{found}; min-replicas-to-write is 0"),
            "set min-replicas-to-write 1 and min-replicas-max-lag 10: a primary that is cut off from \
             its replicas then refuses claims",
        ),
        _ => Finding::ok(CHECK, found),
    }
}

fn memory(at: &str, info: &Fields) -> Finding {
    const CHECK: &str = "memory";
    let (used, max) = (number(info, "used_memory"), number(info, "maxmemory"));
    let policy = field(info, "maxmemory_policy");
    if max == 0 {
        let found = format!("{at}: {} used, maxmemory is not set", bytes(used));
        return Finding::ok(CHECK, found);
    }
    let found = format!("{at}: {} of {} used, {policy}", bytes(used), bytes(max));
    if policy != "noeviction" {
        return Finding::error(
            CHECK,
            found,
            "set maxmemory-policy noeviction: an event whose key is evicted runs again",
        );
    }
    if used >= max / 5 * 4 {
        return Finding::warning(
            CHECK,
            found,
            "raise maxmemory or shorten the retention: a full server refuses new events with 503",
        );
    }
    Finding::ok(CHECK, found)
}

fn evicted(at: &str, info: &Fields) -> Finding {
    let count = number(info, "evicted_keys");
    let found = format!("{at}: {count} key(s) evicted since the server started");
    if count == 0 {
        return Finding::ok("evicted", found);
    }
    Finding::warning(
        "evicted",
        found,
        "give the keys a server of their own with noeviction: keys of this crate may be among them",
    )
}

fn persistence(at: &str, info: &Fields, appendfsync: Option<&str>) -> Finding {
    const CHECK: &str = "persistence";
    let failed =
        |name: &str| info.get(name).is_some_and(|status| !status.is_empty() && status != "ok");
    if failed("aof_last_write_status") || failed("rdb_last_bgsave_status") {
        return Finding::error(
            CHECK,
            format!("{at}: the last write to the disk failed"),
            "see the server's log: it refuses writes until it can write to its disk",
        );
    }
    if field(info, "aof_enabled") != "1" {
        return Finding::warning(
            CHECK,
            format!("{at}: there is no append-only file"),
            "set appendonly yes: a restart loses the keys since the last snapshot, and a primary that \
             restarts empty empties its replicas",
        );
    }
    let found = match appendfsync {
        Some("always") => "flushed before each reply",
        Some("everysec") => "flushed every second: a power failure loses about 1 s",
        Some("no") => {
            return Finding::warning(
                CHECK,
                format!("{at}: append-only file, flushed by the operating system"),
                "set appendfsync everysec or always: a power failure loses about 30 s",
            );
        }
        _ => "appendfsync cannot be read",
    };
    Finding::ok(CHECK, format!("{at}: append-only file, {found}"))
}

fn slots(at: &str, cluster: &Fields) -> Finding {
    const CHECK: &str = "cluster";
    let (state, ok) = (field(cluster, "cluster_state"), number(cluster, "cluster_slots_ok"));
    let found = format!("{at}: state {state}, {ok} of {SLOTS} slots served");
    if state == "ok" && ok == SLOTS {
        return Finding::ok(CHECK, found);
    }
    Finding::error(CHECK, found, "repair the cluster: events whose slot is not served get 503")
}

/// Returns `None` for what is permitted.
fn right((right, tried): &(Right, Result<(), String>)) -> Option<Finding> {
    const CHECK: &str = "rights";
    let error = tried.as_ref().err()?;
    Some(match right {
        Right::Claim => Finding::error(
            CHECK,
            format!("a claim fails: {error}"),
            "see this error; the guide's page `redis` lists the rights",
        ),
        Right::Eval => Finding::error(
            CHECK,
            format!("EVAL fails: {error}"),
            "grant +eval: after a restart of the server no claim works without it",
        ),
        Right::Info => Finding::warning(
            CHECK,
            format!("INFO fails: {error}"),
            "grant +info: losses are found by the canary only, and eviction is not noticed",
        ),
        Right::Wait => Finding::warning(
            CHECK,
            format!("WAIT fails: {error}"),
            "grant +wait: a failover may lose releases of the on-arrival ledger, and so events",
        ),
        Right::List => Finding::warning(
            CHECK,
            format!("a list fails: {error}"),
            "grant +scan, +getrange and +dbsize for `list` and `stats`",
        ),
        Right::Losses => Finding::warning(
            CHECK,
            format!("the stored losses cannot be read: {error}"),
            "grant +lrange",
        ),
    })
}

/// Returns one line for each kind and primary. Each process stores the losses that it finds, so one loss
/// may be stored several times.
fn losses(losses: &Result<Vec<StoredLoss>, String>) -> Vec<Finding> {
    const CHECK: &str = "losses";
    // Why is a finding of `rights`.
    let Ok(losses) = losses else { return Vec::new() };
    if losses.is_empty() {
        return vec![Finding::ok(CHECK, "none was found in the last 30 days")];
    }
    let mut groups: Vec<(StoreLoss, usize)> = Vec::new();
    for StoredLoss { loss, .. } in losses {
        let is_same = |(group, _): &&mut (StoreLoss, usize)| {
            (group.kind, &group.primary) == (loss.kind, &loss.primary)
        };
        match groups.iter_mut().find(is_same) {
            Some((group, count)) => {
                group.since = loss.since.min(group.since);
                group.found_at = loss.found_at.max(group.found_at);
                *count += 1;
            }
            None => groups.push((loss.clone(), 1)),
        }
    }
    let finding = |(loss, count): &(StoreLoss, usize)| {
        let (what, advice) = match loss.kind {
            LossKind::Rewound => ("acknowledged writes are lost", REPLAY),
            LossKind::Emptied => ("keys are gone: a flush, or a restart without data", REPLAY),
            LossKind::Evicted => {
                ("the server evicted keys", "see the lines `memory` and `evicted`")
            }
            _ => ("acknowledged writes may be lost", REPLAY),
        };
        let since = match loss.since {
            UNIX_EPOCH => "of any age".to_owned(),
            since => format!("since {}", utc(since)),
        };
        let (kind, primary, found_at) = (loss.kind.as_str(), &loss.primary, utc(loss.found_at));
        let found =
            format!("{what} ({kind}): {primary}, {since}, found {found_at}, {count} report(s)");
        Finding::warning(CHECK, found, advice)
    };
    groups.iter().map(finding).collect()
}

const REPLAY: &str = "an event of this time may run again if it is delivered again; on arrival, let the \
                      senders deliver it again (the guide's page `redis`)";

#[cfg(test)]
mod tests {
    use super::super::finding::Level::{self, Error, Ok as Fine, Warning};
    use super::*;

    fn fields(fields: &[(&str, &str)]) -> Fields {
        fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn primary() -> Primary {
        Primary {
            address: "127.0.0.1:6379".to_owned(),
            clock_ahead: 0.0,
            info: Ok(fields(&[
                ("redis_version", "7.0.15"),
                ("role", "master"),
                ("loading", "0"),
                ("connected_slaves", "1"),
                ("min_slaves_good_slaves", "1"),
                ("used_memory", "1000"),
                ("maxmemory", "10000"),
                ("maxmemory_policy", "noeviction"),
                ("evicted_keys", "0"),
                ("aof_enabled", "1"),
                ("aof_last_write_status", "ok"),
                ("rdb_last_bgsave_status", "ok"),
            ])),
            cluster: Some(Ok(fields(&[("cluster_state", "ok"), ("cluster_slots_ok", "16384")]))),
            appendfsync: Some("always".to_owned()),
        }
    }

    fn facts() -> Facts {
        Facts {
            topology: Topology::Sentinel,
            is_encrypted: false,
            round_trip: Duration::from_millis(1),
            primaries: vec![primary()],
            rights: vec![(Right::Claim, Ok(())), (Right::Info, Ok(()))],
            losses: Ok(Vec::new()),
        }
    }

    /// Returns the level of this check for facts that differ in one way from a good store.
    fn level_of(check: &str, change: impl FnOnce(&mut Facts)) -> Level {
        let mut facts = facts();
        change(&mut facts);
        let findings = judge(&facts);
        for other in findings.iter().filter(|finding| finding.check != check) {
            assert_eq!(other.level, Fine, "{other:?}");
        }
        findings.iter().find(|finding| finding.check == check).unwrap().level
    }

    /// Returns the level of this check for one other field of `INFO`.
    fn with(check: &str, name: &str, value: &str) -> Level {
        level_of(check, |facts| {
            let info = facts.primaries[0].info.as_mut().unwrap();
            info.insert(name.to_owned(), value.to_owned());
        })
    }

    #[test]
    fn good_store_has_no_finding() {
        assert!(judge(&facts()).iter().all(|finding| finding.level == Fine));
    }

    #[test]
    fn slow_round_trip_is_a_warning() {
        let after =
            |ms| level_of("connection", |facts| facts.round_trip = Duration::from_millis(ms));
        assert_eq!((after(20), after(21)), (Fine, Warning));
    }

    #[test]
    fn another_machine_needs_tls() {
        let at = |address: &str, is_encrypted| {
            level_of("tls", |facts| {
                facts.primaries[0].address = address.to_owned();
                facts.is_encrypted = is_encrypted;
            })
        };
        for local in ["127.0.0.1:1", "[::1]:1", "localhost:1"] {
            assert_eq!(at(local, false), Fine, "{local}");
        }
        assert_eq!(at("10.0.0.1:6379", false), Warning);
        assert_eq!(at("10.0.0.1:6379", true), Fine);
    }

    #[test]
    fn version_must_be_6_2_at_least() {
        for (version, level) in
            [("6.0.9", Error), ("6.2.5", Warning), ("7.0.0", Fine), ("10.1.0", Fine)]
        {
            assert_eq!(with("version", "redis_version", version), level, "{version}");
        }
    }

    #[test]
    fn server_must_be_a_primary_that_has_loaded() {
        assert_eq!(with("primary", "role", "slave"), Error);
        assert_eq!(with("primary", "loading", "1"), Error);
    }

    #[test]
    fn sentinel_and_cluster_need_replicas() {
        assert_eq!(with("replicas", "connected_slaves", "0"), Warning);
        let alone = |topology, field: &str| {
            level_of("replicas", |facts| {
                facts.topology = topology;
                facts.primaries[0].info.as_mut().unwrap().remove(field);
            })
        };
        assert_eq!(alone(Topology::Server, "connected_slaves"), Fine);
        assert_eq!(alone(Topology::Cluster, "connected_slaves"), Warning);
        assert_eq!(alone(Topology::Sentinel, "min_slaves_good_slaves"), Warning);
        assert_eq!(alone(Topology::Cluster, "min_slaves_good_slaves"), Fine);
    }

    #[test]
    fn memory_must_not_evict_and_not_be_full() {
        assert_eq!(with("memory", "maxmemory_policy", "volatile-lru"), Error);
        assert_eq!(with("memory", "used_memory", "7999"), Fine);
        assert_eq!(with("memory", "used_memory", "8000"), Warning);
        assert_eq!(with("memory", "maxmemory", "0"), Fine);
        assert_eq!(with("evicted", "evicted_keys", "1"), Warning);
    }

    #[test]
    fn writes_must_reach_the_disk() {
        assert_eq!(with("persistence", "aof_enabled", "0"), Warning);
        assert_eq!(with("persistence", "aof_last_write_status", "err"), Error);
        assert_eq!(with("persistence", "rdb_last_bgsave_status", "err"), Error);
        let flushed = |how: Option<&str>| {
            level_of("persistence", |facts| {
                facts.primaries[0].appendfsync = how.map(str::to_owned);
            })
        };
        assert_eq!((flushed(Some("everysec")), flushed(None)), (Fine, Fine));
        assert_eq!(flushed(Some("no")), Warning);
    }

    #[test]
    fn every_slot_must_be_served() {
        let cluster = |cluster: Result<Fields, String>| {
            level_of("cluster", |facts| facts.primaries[0].cluster = Some(cluster))
        };
        let state =
            |state, slots| Ok(fields(&[("cluster_state", state), ("cluster_slots_ok", slots)]));
        assert_eq!(cluster(state("fail", "16384")), Error);
        assert_eq!(cluster(state("ok", "16383")), Error);
        assert_eq!(cluster(Err("NOPERM".to_owned())), Warning);
    }

    #[test]
    fn missing_right_is_an_error_if_no_claim_works_without_it() {
        for (right, level) in [
            (Right::Claim, Error),
            (Right::Eval, Error),
            (Right::Info, Warning),
            (Right::Wait, Warning),
            (Right::List, Warning),
            (Right::Losses, Warning),
        ] {
            let rights = vec![(right, Err("NOPERM".to_owned()))];
            assert_eq!(level_of("rights", |facts| facts.rights = rights), level, "{right:?}");
        }
        let info = Err("NOPERM".to_owned());
        assert_eq!(level_of("server", |facts| facts.primaries[0].info = info), Warning);
    }

    #[test]
    fn clock_that_is_furthest_away_counts() {
        let ahead = |seconds| {
            level_of("clock", |facts| {
                facts.primaries.push(Primary { clock_ahead: seconds, ..primary() });
            })
        };
        assert_eq!((ahead(4.9), ahead(-5.0), ahead(-300.0)), (Fine, Warning, Error));
    }
}
