//! [`Servers`]: whether the servers may be used, and whether they may have lost writes.
//!
//! 1. The primaries are asked for `INFO` when connections open.
//! 2. A server that may evict keys, is too old, or is of another kind than the client is not used.
//! 3. Another process (`run_id`), another history (`master_replid`) or more evicted keys than before is a
//!    suspicion, and is told once. It proves no loss, and its absence excludes none.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::{Cmd, ErrorKind, InfoDict, RedisError, RedisResult, ServerErrorKind, Value};

use super::client::Connection;
use super::errors::{Failure, is_of_the_command};
use crate::error::{ConfigError, ConfigErrorKind};
use crate::observe;

/// The oldest version of Redis that the scripts run on.
const OLDEST: (u32, u32) = (6, 0);
/// The oldest version of Redis that knows the flags of a script.
const FLAGS: (u32, u32) = (7, 0);

const TOO_OLD: &str = "the Redis server is older than version 6.0";
const EVICTS: &str = "the Redis server evicts keys: set `maxmemory-policy noeviction`, or accept it with `evictable`";

/// The servers of one adapter.
pub(super) struct Servers {
    evictable: bool,
    in_cluster: bool,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// By address; under one name outside of a cluster, because a failover changes the address.
    identities: HashMap<String, Identity>,
    /// The fault that was told last.
    fault: Option<ConfigError>,
    is_hiding_told: bool,
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
        Self { evictable, in_cluster, known: Mutex::default() }
    }

    /// Asks every primary for `INFO`, and tells what it shows. Returns `false` if one is too old for flags.
    ///
    /// # Errors
    ///
    /// [`Failure::Unfit`] if a primary may not be used; those of the connection.
    pub(super) async fn look(
        &self,
        connection: &Connection,
        address: &str,
    ) -> Result<bool, Failure> {
        let mut command = Cmd::new();
        command.arg("INFO");
        let mut knows_flags = true;
        for (address, reply) in connection.ask_all(address, &command).await? {
            let info = self.info(reply)?;
            if let Some(fault) = fault(&info, self.evictable, self.in_cluster) {
                // Told once, until the servers are mended.
                let told = self.known().fault.replace(fault.clone());
                if told.as_ref() != Some(&fault) {
                    observe::redis_is_unfit(&address, &fault);
                }
                return Err(Failure::Unfit(fault));
            }
            knows_flags &= version(&info).is_none_or(|version| version >= FLAGS);
            self.compare(&address, &info);
        }
        self.known().fault = None;
        Ok(knows_flags)
    }

    fn info(&self, reply: RedisResult<Value>) -> Result<InfoDict, RedisError> {
        let info = match reply {
            Ok(reply) => redis::from_redis_value(reply)?,
            // The server does not let us ask, and works otherwise.
            Err(error) if is_refusal(&error) => InfoDict::new(""),
            Err(error) => return Err(error),
        };
        let hides = !info.contains_key(&"maxmemory_policy") && !self.evictable;
        if hides && !std::mem::replace(&mut self.known().is_hiding_told, true) {
            observe::redis_hides_its_policy();
        }
        Ok(info)
    }

    /// Compares a primary with what is known of it.
    fn compare(&self, address: &str, info: &InfoDict) {
        let name = if self.in_cluster { address } else { "" };
        let identity = Identity::read(info);
        let mut known = self.known();
        let loss = match known.identities.get(name) {
            Some(before) => identity.loss_since(before),
            // A replica that was promoted names the history of the primary before it.
            None => {
                let previous: Option<String> = info.get("master_replid2");
                let is_known = |known: &Identity| Some(&known.replication_id) == previous.as_ref();
                known.identities.values().any(is_known).then_some("suspected")
            }
        };
        known.identities.insert(name.to_owned(), identity);
        drop(known);
        if let Some(kind) = loss {
            observe::store_loss_suspected(kind, address);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Identity {
    /// A field that `INFO` leaves out, as managed services do, is empty.
    fn read(info: &InfoDict) -> Self {
        Self {
            run_id: info.get("run_id").unwrap_or_default(),
            replication_id: info.get("master_replid").unwrap_or_default(),
            evicted: info.get("evicted_keys").unwrap_or_default(),
        }
    }

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

/// Runs a script that has no effect. It runs on a replica too. A server before 7.0 does not know the first line.
async fn probe(connection: &Connection, key: &[u8]) -> Result<bool, RedisError> {
    let eval = async |text: &str| {
        let mut eval = Cmd::new();
        eval.arg("EVAL").arg(text).arg(1).arg(key);
        connection.send(key, &eval).await
    };
    match eval("#!lua flags=no-writes\nreturn 1").await {
        Err(error) if is_of_the_command(&error) => eval("return 1").await.map(|_| false),
        reply => reply.map(|_| true),
    }
}

/// Returns why the server of this `INFO` may not be used.
fn fault(info: &InfoDict, evictable: bool, in_cluster: bool) -> Option<ConfigError> {
    // Valkey from 8.0 on says `server_mode`.
    let mode: Option<String> = info.get("redis_mode").or_else(|| info.get("server_mode"));
    let scheme = match mode.as_deref() {
        Some("sentinel") => Some("redis+sentinel"),
        Some("cluster") if !in_cluster => Some("redis+cluster"),
        _ => None,
    };
    if let Some(scheme) = scheme {
        return Some(wrong_scheme(scheme));
    }
    if version(info).is_some_and(|version| version < OLDEST) {
        return Some(unfit(TOO_OLD));
    }
    let evicts = info.get::<u64>("maxmemory").is_some_and(|bytes| bytes > 0)
        && info.get::<String>("maxmemory_policy").is_some_and(|policy| policy != "noeviction");
    (evicts && !evictable).then(|| unfit(EVICTS))
}

/// Returns the version of Redis; of Valkey, that with which it is compatible.
fn version(info: &InfoDict) -> Option<(u32, u32)> {
    let version: String = info.get("redis_version")?;
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
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

/// Returns the error of a server of another kind than the scheme of the URL says: the scheme for this
/// server, without TLS.
pub(super) fn wrong_scheme(scheme: &str) -> ConfigError {
    unfit(format!("the server is of another kind: use the scheme `{scheme}`"))
}

fn unfit(why: impl Into<Cow<'static, str>>) -> ConfigError {
    ConfigError::new(ConfigErrorKind::Server, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_that_may_not_be_used_is_refused() {
        let scheme = |scheme| Some(wrong_scheme(scheme));
        let (old, evicts) = (Some(unfit(TOO_OLD)), Some(unfit(EVICTS)));
        for (text, in_cluster, expected) in [
            ("", false, None),
            ("redis_version:5.0.14\r\n", false, old),
            ("redis_version:6.0.16\r\n", false, None),
            ("redis_version:6.2.0-rc1\r\n", false, None),
            ("redis_version:10.0.1\r\n", false, None),
            ("redis_version:7\r\n", false, None),
            ("redis_version:\r\n", false, None),
            ("redis_version:unstable\r\n", false, None),
            // Only a limit of memory evicts.
            ("maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", false, None),
            ("maxmemory:1\r\nmaxmemory_policy:volatile-ttl\r\n", false, evicts),
            ("maxmemory:1\r\nmaxmemory_policy:noeviction\r\n", false, None),
            ("maxmemory:1\r\n", false, None),
            ("maxmemory_policy:allkeys-lru\r\n", false, None),
            ("redis_mode:standalone\r\n", false, None),
            ("redis_mode:cluster\r\n", true, None),
            ("redis_mode:cluster\r\n", false, scheme("redis+cluster")),
            ("server_mode:cluster\r\n", false, scheme("redis+cluster")),
            ("redis_mode:sentinel\r\n", false, scheme("redis+sentinel")),
            // A proxy before a cluster says so, and so does a managed service.
            ("redis_mode:standalone\r\n", true, None),
        ] {
            let info = InfoDict::new(text);
            assert_eq!(fault(&info, false, in_cluster), expected, "{text}");
            let accepted = expected.filter(|fault| *fault != unfit(EVICTS));
            assert_eq!(fault(&info, true, in_cluster), accepted, "{text}");
        }
    }

    #[test]
    fn another_process_another_history_and_evictions_are_suspicions() {
        let identity = |run_id: &str, replication_id: &str, evicted: u64| {
            let text = format!(
                "run_id:{run_id}\r\nmaster_replid:{replication_id}\r\nevicted_keys:{evicted}\r\n"
            );
            Identity::read(&InfoDict::new(&text))
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
