//! [`Servers`]: whether the servers may be used, and whether they may have lost writes.
//!
//! 1. The primaries are asked for `INFO` when connections open.
//! 2. A server that may evict keys, is too old, or is of another kind than the client is not used.
//! 3. Another process (`run_id`), another history (`master_replid`) or more evicted keys than
//!    before raises a suspicion, which is reported once. A suspicion does not prove a loss, and
//!    writes may be lost without one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use futures_util::future::select_ok;
use redis::{InfoDict, RedisError};

use super::client::Connection;
use super::errors::Failure;
use super::options::RedisOptions;
use crate::error::ConfigError;
use crate::observe;

/// The oldest major version of Redis that the scripts run on.
const OLDEST: u32 = 6;

const TOO_OLD: &str = "the Redis server is older than version 6.0";
const EVICTS: &str = "the Redis server evicts keys: set `maxmemory-policy noeviction`, or accept it with `evictable`";

/// What is known of the servers of one adapter.
#[derive(Default)]
pub(super) struct Servers(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// The identities by address. Outside a cluster there is one name, because a failover changes
    /// the address.
    identities: HashMap<String, Identity>,
    /// The fault that was reported last.
    fault: Option<ConfigError>,
    is_hiding_told: bool,
}

/// Names a process and its history; how many keys it has evicted.
type Identity = ([String; 2], u64);

impl Servers {
    /// Asks every primary for `INFO`, and tells what it shows.
    ///
    /// # Errors
    ///
    /// [`Failure::Unfit`] if a primary may not be used; those of the connection.
    pub(super) async fn look(
        &self,
        connection: &Connection,
        options: &RedisOptions,
    ) -> Result<(), Failure> {
        for (address, reply) in connection.ask_all(&redis::cmd("INFO")).await? {
            let info = match reply {
                Ok(reply) => redis::from_redis_value(reply).map_err(RedisError::from)?,
                // The server does not let us ask, and works otherwise.
                Err(error) if is_refusal(&error) => InfoDict::new(""),
                Err(error) => return Err(error.into()),
            };
            let in_cluster = matches!(connection, Connection::Cluster(_));
            let mut known = self.known();
            if let Some(fault) = fault(&info, options.evictable, in_cluster) {
                // Told once, until the servers are mended.
                if known.fault.as_ref() != Some(&fault) {
                    observe::records::redis_is_unfit(&address, &fault);
                }
                known.fault = Some(fault.clone());
                return Err(Failure::Unfit(fault));
            }
            let hides = !info.contains_key(&"maxmemory_policy") && !options.evictable;
            if hides && !std::mem::replace(&mut known.is_hiding_told, true) {
                observe::records::redis_hides_its_policy();
            }
            if let Some(kind) = known.compare(if in_cluster { &address } else { "" }, &info) {
                observe::records::store_loss_suspected(kind, &address);
            }
        }
        self.known().fault = None;
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Compares a primary with what is known of it. Returns the kind of loss that a difference
    /// suggests.
    fn compare(&mut self, name: &str, info: &InfoDict) -> Option<&'static str> {
        // A field that `INFO` leaves out, as managed services do, is empty.
        let text = |field| info.get::<String>(field).unwrap_or_default();
        let now = [text("run_id"), text("master_replid")];
        let evicted: u64 = info.get("evicted_keys").unwrap_or_default();
        let kind = match self.identities.get(name) {
            Some((before, _)) if *before != now => Some("suspected"),
            Some((_, before)) => (evicted > *before).then_some("evicted"),
            // A replica that was promoted names the history of the primary before it.
            None => {
                let previous: Option<String> = info.get("master_replid2");
                let is_it = |([_, history], _): &Identity| Some(history) == previous.as_ref();
                self.identities.values().any(is_it).then_some("suspected")
            }
        };
        self.identities.insert(name.to_owned(), (now, evicted));
        kind
    }
}

/// Runs a script that has no effect. In a cluster, one of three primaries is enough.
pub(super) async fn runs_scripts(connection: &Connection, prefix: &str) -> Result<(), Failure> {
    let probe = async |key: u8| {
        // The name of no event's key.
        let key = format!("{prefix}::{key}");
        connection.send(redis::cmd("EVAL").arg("return 1").arg(1).arg(key)).await
    };
    select_ok((0..3).map(|key| Box::pin(probe(key)))).await?;
    Ok(())
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

/// Returns the major version of Redis; of Valkey, that with which it is compatible.
fn version(info: &InfoDict) -> Option<u32> {
    info.get::<String>("redis_version")?.split('.').next()?.parse().ok()
}

fn is_refusal(error: &RedisError) -> bool {
    let is_unknown = |detail: &str| detail.starts_with("unknown command");
    error.code() == Some("NOPERM") || error.detail().is_some_and(is_unknown)
}

/// Returns the error of a server of another kind than the scheme of the URL says: the scheme for
/// this server, without TLS.
pub(super) fn wrong_scheme(scheme: &str) -> ConfigError {
    unfit(format!("the server is of another kind: use the scheme `{scheme}`"))
}

fn unfit(why: impl Into<Cow<'static, str>>) -> ConfigError {
    ConfigError::new(why)
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
        let info = |run_id: &str, replication_id: &str, evicted: u64| {
            InfoDict::new(&format!(
                "run_id:{run_id}\r\nmaster_replid:{replication_id}\r\nevicted_keys:{evicted}\r\n"
            ))
        };
        for (now, kind) in [
            (info("r1", "h1", 7), None),
            (info("r2", "h1", 0), Some("suspected")),
            (info("r1", "h2", 7), Some("suspected")),
            (info("r1", "h1", 8), Some("evicted")),
        ] {
            let mut known = Known::default();
            assert_eq!(known.compare("", &info("r1", "h1", 7)), None);
            assert_eq!(known.compare("", &now), kind, "{now:?}");
        }
    }
}
