//! [`Servers`]: whether the servers may be used, and whether they may have lost writes.
//!
//! 1. Each connection that opens asks `INFO` once. In a cluster, where the library opens connections by
//!    itself, the primaries are asked again after a failure.
//! 2. A server that may evict keys, is too old, or is of another kind than the client is not used.
//! 3. Another process (`run_id`), another history (`master_replid`) or more evicted keys than before is a
//!    suspicion, and is told once. It proves no loss, and its absence excludes none.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};

use super::client::Connection;
use super::errors::{Failure, is_of_the_command};
use crate::error::ConfigError;
use crate::observe;

/// The oldest version of Redis that the scripts run on.
const OLDEST: (u32, u32) = (6, 0);

/// Has no effect. A server before 7.0 does not know its first line. It runs on a replica too.
const FLAGGED_PROBE: &str = "#!lua flags=no-writes\nreturn 1";
const PLAIN_PROBE: &str = "return 1";

/// What is known of the servers of one adapter.
pub(super) struct Servers {
    evictable: bool,
    in_cluster: bool,
    /// By address; under one name outside of a cluster, because a failover changes the address.
    known: Mutex<HashMap<String, Identity>>,
    /// The fault that was told last.
    fault: Mutex<Option<ConfigError>>,
    is_hiding_told: AtomicBool,
}

/// Names a process and its history.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Identity {
    run_id: String,
    replication_id: String,
    evicted: u64,
}

impl Servers {
    pub(super) fn new(evictable: bool, in_cluster: bool) -> Self {
        Self {
            evictable,
            in_cluster,
            known: Mutex::default(),
            fault: Mutex::default(),
            is_hiding_told: AtomicBool::new(false),
        }
    }

    /// Asks every primary for `INFO`, and tells what it shows.
    ///
    /// # Errors
    ///
    /// [`Failure::Unfit`] if a primary may not be used; those of the connection.
    pub(super) async fn look(&self, connection: &Connection, address: &str) -> Result<(), Failure> {
        let mut info = Cmd::new();
        info.arg("INFO");
        for (address, reply) in connection.ask_all(address, &info).await? {
            let info = self.info(reply)?;
            if let Some(fault) = info.fault(self.evictable, self.in_cluster) {
                // Told once, until the servers are mended.
                if lock(&self.fault).replace(fault.clone()).as_ref() != Some(&fault) {
                    observe::redis_is_unfit(&address, &fault);
                }
                return Err(Failure::Unfit(fault));
            }
            self.compare(&address, info);
        }
        lock(&self.fault).take();
        Ok(())
    }

    fn info(&self, reply: RedisResult<Value>) -> Result<ServerInfo, RedisError> {
        let text = match reply {
            Ok(reply) => redis::from_redis_value::<String>(reply)?,
            // The server does not let us ask, and works otherwise.
            Err(error) if is_refusal(&error) => String::new(),
            Err(error) => return Err(error),
        };
        let info = ServerInfo::read(&text);
        let hides = info.policy.is_none() && !self.evictable;
        if hides && !self.is_hiding_told.swap(true, Ordering::Relaxed) {
            observe::redis_hides_its_policy();
        }
        Ok(info)
    }

    /// Compares a primary with what is known of it.
    fn compare(&self, address: &str, info: ServerInfo) {
        let name = if self.in_cluster { address } else { "" };
        let mut known = lock(&self.known);
        let loss = match known.get(name) {
            Some(before) => info.identity.loss_since(before),
            // A replica that was promoted names the history of the primary before it.
            None => known
                .values()
                .any(|known| Some(&known.replication_id) == info.previous_id.as_ref())
                .then_some("suspected"),
        };
        known.insert(name.to_owned(), info.identity);
        drop(known);
        if let Some(kind) = loss {
            observe::store_loss_suspected(kind, address);
        }
    }
}

impl Identity {
    /// Returns the kind of loss that the difference suggests.
    fn loss_since(&self, before: &Self) -> Option<&'static str> {
        if (&self.run_id, &self.replication_id) != (&before.run_id, &before.replication_id) {
            Some("suspected")
        } else {
            (self.evicted > before.evicted).then_some("evicted")
        }
    }
}

/// Finds out whether the server knows the flags of a script, and whether it runs scripts at all. `keys` may be on
/// several primaries: one reply is enough.
pub(super) async fn knows_flags(
    connection: &Connection,
    keys: &[Vec<u8>],
) -> Result<bool, RedisError> {
    let probes = keys.iter().map(|key| Box::pin(probe(connection, key)));
    futures_util::future::select_ok(probes).await.map(|(knows_flags, _)| knows_flags)
}

async fn probe(connection: &Connection, key: &[u8]) -> Result<bool, RedisError> {
    let script = |text: &str| {
        let mut eval = Cmd::new();
        eval.arg("EVAL").arg(text).arg(1).arg(key);
        eval
    };
    match connection.send(key, &script(FLAGGED_PROBE)).await {
        Ok(_) => Ok(true),
        Err(error) if is_of_the_command(&error) => {
            connection.send(key, &script(PLAIN_PROBE)).await.map(|_| false)
        }
        Err(error) => Err(error),
    }
}

/// What `INFO` says. A field that it leaves out, as managed services do, is `None` or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ServerInfo {
    version: Option<(u32, u32)>,
    mode: Option<String>,
    maxmemory: Option<u64>,
    policy: Option<String>,
    identity: Identity,
    /// The history that the server has continued.
    previous_id: Option<String>,
}

impl ServerInfo {
    fn read(text: &str) -> Self {
        let mut info = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.trim_end().split_once(':') else { continue };
            match name {
                // Valkey writes the version of Redis here with which it is compatible.
                "redis_version" => info.version = version(value),
                // Valkey from 8.0 on says `server_mode`.
                "redis_mode" | "server_mode" => info.mode = Some(value.to_owned()),
                "maxmemory" => info.maxmemory = value.parse().ok(),
                "maxmemory_policy" => info.policy = Some(value.to_owned()),
                "run_id" => value.clone_into(&mut info.identity.run_id),
                "master_replid" => value.clone_into(&mut info.identity.replication_id),
                "master_replid2" => info.previous_id = Some(value.to_owned()),
                "evicted_keys" => info.identity.evicted = value.parse().unwrap_or_default(),
                _ => {}
            }
        }
        info
    }

    /// Returns why the server may not be used.
    fn fault(&self, evictable: bool, in_cluster: bool) -> Option<ConfigError> {
        let is_node = match self.mode.as_deref() {
            Some("sentinel") => {
                return Some(ConfigError::WrongRedisScheme { scheme: "redis+sentinel" });
            }
            Some(mode) => mode == "cluster",
            None => in_cluster,
        };
        if is_node && !in_cluster {
            return Some(ConfigError::WrongRedisScheme { scheme: "redis+cluster" });
        }
        if self.version.is_some_and(|version| version < OLDEST) {
            return Some(ConfigError::RedisTooOld);
        }
        let evicts = self.maxmemory.is_some_and(|bytes| bytes > 0)
            && self.policy.as_deref().is_some_and(|policy| policy != "noeviction");
        (evicts && !evictable).then_some(ConfigError::RedisEvictsKeys)
    }
}

fn is_refusal(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::NoPerm) => true,
        ErrorKind::Server(ServerErrorKind::ResponseError) => {
            error.detail().is_some_and(|detail| detail.starts_with("unknown command"))
        }
        _ => false,
    }
}

fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIS_7: &str = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\nrun_id:r1\r\n\
        # Memory\r\nmaxmemory:1048576\r\nmaxmemory_policy:allkeys-lru\r\n\
        # Stats\r\nevicted_keys:7\r\n# Replication\r\nrole:master\r\nmaster_replid:h1\r\n";

    #[test]
    fn info_of_a_server_is_read() {
        let info = ServerInfo::read(REDIS_7);
        assert_eq!(info.version, Some((7, 0)));
        let (run_id, replication_id) = ("r1".to_owned(), "h1".to_owned());
        assert_eq!(info.identity, Identity { run_id, replication_id, evicted: 7 });
        assert_eq!(info.fault(false, false), Some(ConfigError::RedisEvictsKeys));
        assert_eq!(info.fault(true, false), None);
    }

    #[test]
    fn old_versions_are_refused() {
        let old = Some(ConfigError::RedisTooOld);
        for (text, fault) in [
            ("5.0.14", old),
            ("6.0.16", None),
            ("6.2.0-rc1", None),
            ("10.0.1", None),
            ("7", None),
            ("", None),
            ("unstable", None),
        ] {
            let info = ServerInfo::read(&format!("redis_version:{text}\r\n"));
            assert_eq!(info.fault(false, false), fault, "{text}");
        }
    }

    #[test]
    fn only_a_limit_of_memory_evicts() {
        for (text, evicts) in [
            ("maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", false),
            ("maxmemory:1\r\nmaxmemory_policy:volatile-ttl\r\n", true),
            ("maxmemory:1\r\nmaxmemory_policy:noeviction\r\n", false),
            ("maxmemory:1\r\n", false),
            ("maxmemory_policy:allkeys-lru\r\n", false),
            ("", false),
        ] {
            let fault = ServerInfo::read(text).fault(false, false);
            assert_eq!(fault, evicts.then_some(ConfigError::RedisEvictsKeys), "{text}");
        }
    }

    #[test]
    fn the_client_must_fit_the_server() {
        let scheme = |mode: &str, in_cluster| {
            let info = ServerInfo::read(&format!("redis_mode:{mode}\r\n"));
            match info.fault(false, in_cluster) {
                Some(ConfigError::WrongRedisScheme { scheme }) => scheme,
                other => {
                    assert_eq!(other, None);
                    ""
                }
            }
        };
        assert_eq!(scheme("standalone", false), "");
        assert_eq!(scheme("cluster", true), "");
        assert_eq!(scheme("cluster", false), "redis+cluster");
        let valkey = ServerInfo::read("server_mode:cluster\r\n").fault(false, false);
        assert!(matches!(valkey, Some(ConfigError::WrongRedisScheme { .. })), "{valkey:?}");
        assert_eq!(scheme("sentinel", false), "redis+sentinel");
        // A proxy before a cluster says so, and so does a managed service.
        assert_eq!(scheme("standalone", true), "");
    }

    #[test]
    fn another_process_another_history_and_evictions_are_suspicions() {
        let identity = |run_id: &str, replication_id: &str, evicted| Identity {
            run_id: run_id.to_owned(),
            replication_id: replication_id.to_owned(),
            evicted,
        };
        let before = identity("r1", "h1", 7);
        for (now, kind) in [
            (identity("r1", "h1", 7), None),
            (identity("r2", "h1", 0), Some("suspected")),
            (identity("r1", "h2", 7), Some("suspected")),
            (identity("r1", "h1", 8), Some("evicted")),
        ] {
            assert_eq!(now.loss_since(&before), kind, "{now:?}");
        }
    }
}
