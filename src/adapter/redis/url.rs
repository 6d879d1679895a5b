//! [`Endpoint`]: where a URL leads. The page of [`RedisAdapter`](super::RedisAdapter#the-url) has
//! the URLs.
//!
//! `rediss` is `redis` with TLS. `valkey` and `valkeys` are other names of both. `redis` reads the
//! URL of each host.

use percent_encoding::percent_decode_str;
use redis::{ConnectionInfo, IntoConnectionInfo};

use crate::error::ConfigError;

const SEVERAL_HOSTS: &str =
    "the store URL names several hosts: use the scheme `redis+sentinel` or `redis+cluster`";
const UNKNOWN_PARAMETER: &str = "the store URL has a parameter other than `dedup_prefix`";

/// The kind of servers at the addresses of a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServerKind {
    Server,
    Sentinel,
    Cluster,
}

/// Where a URL leads. Has no `Debug`, because it holds the password.
pub(super) struct Endpoint {
    pub(super) kind: ServerKind,
    pub(super) tls: bool,
    /// At least one; one for [`ServerKind::Server`].
    pub(super) nodes: Vec<ConnectionInfo>,
    /// The name of the master, for Sentinel.
    pub(super) master: String,
    /// The prefix, as it is written in the URL.
    pub(super) prefix: Option<String>,
}

impl Endpoint {
    /// Reads a URL.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]. None contains a part of the URL but an unknown scheme.
    pub(super) fn read(url: &str) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(ConfigError::url)?;
        let (server, kind) = match scheme.split_once('+') {
            None => (scheme, ServerKind::Server),
            Some((server, "sentinel")) => (server, ServerKind::Sentinel),
            Some((server, "cluster")) => (server, ServerKind::Cluster),
            Some(_) => ("", ServerKind::Server),
        };
        let tls = match server {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            _ => return Err(ConfigError::unknown_scheme(scheme)),
        };
        if tls && !cfg!(any(feature = "tls-rustls-no-provider", feature = "tls-native-tls")) {
            let needs = "`rediss:` needs the cargo feature `tls-rustls` of tower-dedup";
            return Err(ConfigError::new(needs));
        }
        // `redis` takes `#insecure`.
        if rest.contains('#') {
            return Err(ConfigError::url());
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        let (master, database) = match kind {
            ServerKind::Sentinel => path.split_once('/').unwrap_or((path, "")),
            ServerKind::Server | ServerKind::Cluster => ("", path),
        };
        let master = percent_decode_str(master).decode_utf8().map_err(|_| ConfigError::url())?;
        let node = |host: &str| {
            let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
            let port = if kind == ServerKind::Sentinel && !has_port { ":26379" } else { "" };
            format!("{server}://{credentials}{host}{port}/{database}").into_connection_info()
        };
        let nodes = hosts.split(',').map(node).collect::<Result<Vec<_>, _>>();
        let nodes = nodes.map_err(|_| ConfigError::url())?;
        if kind == ServerKind::Server && nodes.len() > 1 {
            return Err(refused(SEVERAL_HOSTS));
        }
        let last = if kind == ServerKind::Cluster { 0 } else { i64::MAX };
        let is_valid = nodes.iter().all(|node| (0..=last).contains(&node.redis_settings().db()))
            && (kind != ServerKind::Sentinel || !master.is_empty());
        let prefix = match query.split_once('=') {
            _ if !is_valid => return Err(ConfigError::url()),
            None if query.is_empty() => None,
            Some(("dedup_prefix", prefix)) => Some(prefix.to_owned()),
            // The name may be a part of a password with a `?`.
            _ => return Err(refused(UNKNOWN_PARAMETER)),
        };
        Ok(Self { kind, tls, nodes, master: master.into_owned(), prefix })
    }
}

fn refused(why: &'static str) -> ConfigError {
    ConfigError::new(why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;
    use redis::ConnectionAddr;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 5_000,
            rng_seed: RngSeed::Fixed(0x5EED),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// A URL is refused without its password, or leads to hosts with the credentials that it
        /// has.
        #[test]
        fn url_leads_to_hosts_or_is_refused_without_its_password(
            scheme in r"(redis|rediss|valkey|valkeys|x)(\+sentinel|\+cluster)?|\PC{0,6}",
            rest in r"(.{0,4}@)?(\[?[a-z0-9.:]{0,4}\]?(:[0-9]{1,5})?,?){0,3}(/[a-z0-9%]{0,4}){0,2}(\?[a-z_=&@#]{0,4})?|.{0,20}",
        ) {
            if let Ok(endpoint) = Endpoint::read(&format!("{scheme}://{rest}")) {
                assert!(!endpoint.nodes.is_empty());
                assert!(endpoint.kind != ServerKind::Server || endpoint.nodes.len() == 1);
                assert_eq!(endpoint.kind == ServerKind::Sentinel, !endpoint.master.is_empty());
                for node in &endpoint.nodes {
                    let (ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. }) =
                        node.addr()
                    else {
                        panic!("{:?}", node.addr());
                    };
                    assert!(!host.is_empty() && !host.contains(char::is_whitespace));
                    assert!(node.redis_settings().db() >= 0);
                }
            }
            match Endpoint::read(&format!("{scheme}://user:Geheim7@{rest}")) {
                Ok(endpoint) => {
                    // A later `@` makes the text before it a part of the password.
                    let password = endpoint.nodes[0].redis_settings().password().unwrap();
                    assert!(password.starts_with("Geheim7"));
                }
                Err(error) => {
                    let shown = format!("{error:?} {error}");
                    assert!(!shown.contains("Geheim7"), "{shown}");
                }
            }
        }
    }

    fn config_error(url: &str) -> ConfigError {
        let error = Endpoint::read(url).err().expect(url);
        assert!(!format!("{error:?} {error}").contains("secret"), "{url}");
        error
    }

    #[test]
    fn hosts_and_credentials_are_those_of_the_url() {
        let sentinel = "redis+sentinel://u:p@a,b:1,[::1]:2,[::1]/the%20master/4";
        for (url, hosts, username, password, database) in [
            ("redis://me:p%40ss%2Fw@db:7/3", &["db:7"][..], Some("me"), Some("p@ss/w"), 3),
            ("redis://h", &["h:6379"], None, None, 0),
            // A later `@` makes the text before it a part of the password.
            ("redis://me:a@b@h", &["h:6379"], Some("me"), Some("a@b"), 0),
            ("valkey://:secret@[::1]", &["::1:6379"], None, Some("secret"), 0),
            ("redis://[fe80::2]:7001/", &["fe80::2:7001"], None, None, 0),
            (sentinel, &["a:26379", "b:1", "::1:2", "::1:26379"], Some("u"), Some("p"), 4),
            ("redis+cluster://a,b:7", &["a:6379", "b:7"], None, None, 0),
        ] {
            let nodes = Endpoint::read(url).expect(url).nodes;
            let found: Vec<_> = nodes.iter().map(|node| node.addr().to_string()).collect();
            assert_eq!(found, hosts);
            for settings in nodes.iter().map(ConnectionInfo::redis_settings) {
                assert_eq!((settings.username(), settings.password()), (username, password));
                assert_eq!(settings.db(), database);
            }
        }
        assert_eq!(Endpoint::read(sentinel).ok().unwrap().master, "the master");
    }

    #[test]
    fn prefix_is_the_only_parameter() {
        let endpoint = Endpoint::read("redis://h?dedup_prefix=shop").ok().unwrap();
        assert_eq!(endpoint.prefix.unwrap(), "shop");
        for url in ["redis://h?protocol=resp3", "redis://h?secret@h", "redis://h?a&dedup_prefix=b"]
        {
            assert_eq!(config_error(url).to_string(), UNKNOWN_PARAMETER, "{url}");
        }
        assert_eq!(config_error("redis://:secret?x@h"), ConfigError::url());
    }

    #[test]
    fn unreadable_urls_are_refused_without_their_text() {
        for url in [
            "redis:secret",
            "default:secret@h?x=http://h",
            "redis://",
            "redis://:secret@",
            "redis://:secret@h:port",
            "redis://:secret@h:70000",
            "redis://:secret@[::1",
            "redis://:secret@[::1]7",
            "redis://:secret@[secret]:1",
            "redis://:secret@h/-1",
            "redis://:secret@h/db",
            "redis://:secret%ff@h",
            "redis://:secret@h/#insecure",
            "redis://:secret@h,",
            "redis+sentinel://:secret@h",
            "redis+sentinel://:secret@h/",
            "redis+cluster://:secret@h/1",
        ] {
            assert_eq!(config_error(url), ConfigError::url(), "{url}");
        }
        assert_eq!(config_error("redis://:secret@a,b").to_string(), SEVERAL_HOSTS);
        for url in ["redis+unix://h", "http://h", "postgres+cluster://h"] {
            let refused = config_error(url).to_string();
            assert!(refused.starts_with("no adapter for the scheme"), "{refused}");
        }
    }

    #[test]
    #[cfg(not(any(feature = "tls-rustls-no-provider", feature = "tls-native-tls")))]
    fn tls_without_its_feature_names_the_feature() {
        for url in ["rediss://h", "rediss+sentinel://h/m", "valkeys+cluster://h"] {
            assert!(config_error(url).to_string().contains("feature"), "{url}");
        }
    }
}
