//! [`ServerInfo`]: what a server says about itself, and whether it may be used.

use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};

use crate::error::ConfigError;

/// The oldest version of Redis that the scripts run on.
const OLDEST: (u32, u32) = (6, 2);
/// The first version that knows the flags of a script.
const KNOWS_FLAGS: (u32, u32) = (7, 0);

/// What `INFO` says. A field that it leaves out, as managed services do, is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ServerInfo {
    version: Option<(u32, u32)>,
    mode: Option<String>,
    maxmemory: Option<u64>,
    policy: Option<String>,
    role: Option<String>,
    replicas: u32,
}

impl ServerInfo {
    /// Asks a server. Returns `None` if its access rules refuse `INFO`.
    pub(super) async fn ask(
        connection: &mut (impl ConnectionLike + Send),
    ) -> Result<Option<Self>, RedisError> {
        let mut pipeline = Pipeline::new();
        // Before 7.0, `INFO` takes one section.
        for section in ["server", "memory", "replication"] {
            pipeline.add_command(info(section));
        }
        Self::of_replies(connection.req_packed_commands(&pipeline, 0, 3).await?)
    }

    pub(super) fn of_replies(replies: Vec<Value>) -> Result<Option<Self>, RedisError> {
        let mut text = String::new();
        for reply in replies {
            let section = reply.extract_error();
            match section.and_then(|text| Ok(redis::from_redis_value::<String>(text)?)) {
                Ok(section) => text.push_str(&section),
                Err(error) if is_refusal(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(Self::read(&text)))
    }

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
                "role" => info.role = Some(value.to_owned()),
                _ if name.starts_with("slave") && value.contains("state=online") => {
                    info.replicas += 1;
                }
                _ => {}
            }
        }
        info
    }

    /// Returns `false` for a version that does not know the flags of a script.
    pub(super) fn knows_flags(&self) -> bool {
        self.version.is_none_or(|version| version >= KNOWS_FLAGS)
    }

    pub(super) fn is_master(&self) -> bool {
        self.role.as_deref().is_none_or(|role| role == "master")
    }

    /// Returns the number of replicas that take the writes of this server.
    pub(super) fn replicas(&self) -> u32 {
        self.replicas
    }

    /// Returns why the server may not be used.
    pub(super) fn fault(&self, evictable: bool, in_cluster: bool) -> Option<ConfigError> {
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

pub(super) fn info(section: &str) -> Cmd {
    let mut command = Cmd::new();
    command.arg("INFO").arg(section);
    command
}

/// Returns `true` if the server does not let us ask, and works otherwise.
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

#[cfg(test)]
mod tests {
    use super::*;

    const REDIS_7: &str = "# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n\
        # Memory\r\nmaxmemory:1048576\r\nmaxmemory_policy:allkeys-lru\r\n\
        # Replication\r\nrole:master\r\nconnected_slaves:2\r\n\
        slave0:ip=127.0.0.1,port=1,state=online,offset=1,lag=0\r\n\
        slave1:ip=127.0.0.1,port=2,state=wait_bgsave,offset=0,lag=0\r\n";

    #[test]
    fn info_of_a_server_is_read() {
        let info = ServerInfo::read(REDIS_7);
        assert_eq!(info.version, Some((7, 0)));
        assert!(info.knows_flags() && info.is_master());
        assert_eq!(info.replicas(), 1);
        assert_eq!(info.fault(false, false), Some(ConfigError::RedisEvictsKeys));
        assert_eq!(info.fault(true, false), None);
    }

    #[test]
    fn versions_decide_what_the_scripts_may_use() {
        for (text, known, fault) in [
            ("5.0.14", false, Some(ConfigError::RedisTooOld)),
            ("6.0.16", false, Some(ConfigError::RedisTooOld)),
            ("6.2.5", false, None),
            ("6.2.0-rc1", false, None),
            ("7.0.0", true, None),
            ("7.2.4", true, None),
            ("10.0.1", true, None),
            ("7", true, None),
            ("", true, None),
            ("unstable", true, None),
        ] {
            let info = ServerInfo::read(&format!("redis_version:{text}\r\n"));
            assert_eq!((info.knows_flags(), info.fault(false, false)), (known, fault), "{text}");
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
    fn the_scheme_must_fit_the_server() {
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
}
