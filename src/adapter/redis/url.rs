//! [`Endpoint`]: where a URL leads.
//!
//! | URL | topology |
//! |---|---|
//! | `redis://[user:password@]host[:port][/db]` | one server |
//! | `redis+sentinel://[user:password@]host[:port],host[:port]/master[/db]` | the master that Sentinel names |
//! | `redis+cluster://[user:password@]host[:port],host[:port]` | a cluster |
//!
//! `rediss` is `redis` with TLS. `valkey` and `valkeys` are other names of both.

use std::fmt;

use percent_encoding::percent_decode_str;

use crate::error::{ConfigError, Error, check};

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The host and the port of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Address {
    /// Without the brackets of an IPv6 address.
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// What is at the addresses of a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Server,
    Sentinel,
    Cluster,
}

/// Where a URL leads. Has no `Debug`, because it holds the password.
pub(super) struct Endpoint {
    pub(super) kind: Kind,
    pub(super) tls: bool,
    pub(super) addresses: Vec<Address>,
    /// The name of the master, for Sentinel.
    pub(super) master: String,
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
    pub(super) prefix: Option<String>,
}

impl Endpoint {
    /// Reads a URL.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]. None contains a part of the URL.
    pub(super) fn read(url: &str) -> Result<Self, Error> {
        let (scheme, rest) = url.split_once("://").ok_or(ConfigError::InvalidUrl)?;
        let (kind, tls) = scheme_of(scheme)?;
        if tls && !cfg!(any(feature = "tls-rustls-no-provider", feature = "tls-native-tls")) {
            return Err(
                ConfigError::FeatureDisabled { scheme: "rediss", feature: "tls-rustls" }.into()
            );
        }
        if rest.contains('#') {
            return Err(ConfigError::InvalidUrl.into());
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(credentials), hosts),
            None => (None, authority),
        };
        let (username, password) = credentials.map_or(Ok((None, None)), read_credentials)?;
        let port = if kind == Kind::Sentinel { SENTINEL_PORT } else { PORT };
        let addresses: Vec<_> =
            hosts.split(',').map(|host| read_host(host, port)).collect::<Result<_, _>>()?;
        if kind == Kind::Server && addresses.len() > 1 {
            return Err(ConfigError::SeveralRedisHosts.into());
        }
        let (master, database) = read_path(kind, path)?;
        let prefix = read_query(query)?;
        Ok(Self { kind, tls, addresses, master, username, password, database, prefix })
    }
}

fn scheme_of(scheme: &str) -> Result<(Kind, bool), ConfigError> {
    let (server, kind) = match scheme.split_once('+') {
        None => (scheme, Kind::Server),
        Some((server, "sentinel")) => (server, Kind::Sentinel),
        Some((server, "cluster")) => (server, Kind::Cluster),
        Some(_) => return Err(ConfigError::UnknownScheme(scheme.to_owned())),
    };
    match server {
        "redis" | "valkey" => Ok((kind, false)),
        "rediss" | "valkeys" => Ok((kind, true)),
        _ => Err(ConfigError::UnknownScheme(scheme.to_owned())),
    }
}

type Credentials = (Option<String>, Option<String>);

fn read_credentials(text: &str) -> Result<Credentials, ConfigError> {
    let (username, password) = match text.split_once(':') {
        Some((username, password)) => (username, Some(decode(password)?)),
        None => (text, None),
    };
    let username = (!username.is_empty()).then(|| decode(username)).transpose()?;
    Ok((username, password))
}

fn read_host(text: &str, default_port: u16) -> Result<Address, ConfigError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or(ConfigError::InvalidUrl)?;
            let is_ip = host.parse::<std::net::Ipv6Addr>().is_ok();
            let port = match port.strip_prefix(':') {
                Some(port) => Some(port),
                None if port.is_empty() => None,
                None => return Err(ConfigError::InvalidUrl),
            };
            (is_ip.then(|| host.to_owned()), port)
        }
        None => match text.split_once(':') {
            Some((host, port)) => (Some(decode(host)?), Some(port)),
            None => (Some(decode(text)?), None),
        },
    };
    let is_host = |host: &String| {
        !host.is_empty() && !host.contains(|char: char| char.is_whitespace() || char.is_control())
    };
    let host = host.filter(is_host).ok_or(ConfigError::InvalidUrl)?;
    let port = port.map_or(Ok(default_port), str::parse).map_err(|_| ConfigError::InvalidUrl)?;
    Ok(Address { host, port })
}

/// Returns the name of the master and the number of the database.
fn read_path(kind: Kind, path: &str) -> Result<(String, i64), ConfigError> {
    let (master, database) = match kind {
        Kind::Sentinel => path.split_once('/').unwrap_or((path, "")),
        Kind::Server | Kind::Cluster => ("", path),
    };
    let database = match database {
        "" => 0,
        number => number.parse::<u32>().map_err(|_| ConfigError::InvalidUrl)?,
    };
    // A cluster has the database 0 only.
    let is_valid = match kind {
        Kind::Server => true,
        Kind::Sentinel => !master.is_empty(),
        Kind::Cluster => database == 0,
    };
    if !is_valid {
        return Err(ConfigError::InvalidUrl);
    }
    Ok((decode(master)?, i64::from(database)))
}

fn read_query(query: &str) -> Result<Option<String>, ConfigError> {
    let mut prefix = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("dedup_prefix", value)) => prefix = Some(checked_prefix(&decode(value)?)?),
            // The name may be a part of a password with a `?`.
            _ => return Err(ConfigError::UnknownUrlParameter),
        }
    }
    Ok(prefix)
}

/// Returns a prefix that matches `[A-Za-z0-9_.-]{1,32}`.
pub(super) fn checked_prefix(prefix: &str) -> Result<String, ConfigError> {
    let is_valid = matches!(prefix.len(), 1..=32)
        && prefix.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
    check(is_valid, "prefix", "1 to 32 characters of `A-Z a-z 0-9 _ . -`")?;
    Ok(prefix.to_owned())
}

fn decode(text: &str) -> Result<String, ConfigError> {
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded.map_err(|_| ConfigError::InvalidUrl)?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::fuzz;

    /// A URL is refused without a part of its text, or leads to hosts with the credentials that it has.
    #[test]
    fn fuzz_redis_url() {
        let seeds = [
            "redis://me:p%40ss%2Fw@db.example:7000/3?dedup_prefix=shop",
            "redis+sentinel://u:p@a,b:1,[::1]:2/the%20master/4",
            "valkey+cluster://a,b:7",
            "rediss://:secret@[::1",
        ];
        let seeds = seeds.map(|url| url.as_bytes().to_vec());
        fuzz("redis_url", 20_000, &seeds, |input| {
            let url = String::from_utf8_lossy(input);
            if let Ok(endpoint) = Endpoint::read(&url) {
                assert!(!endpoint.addresses.is_empty() && endpoint.database >= 0);
                assert!(endpoint.kind != Kind::Server || endpoint.addresses.len() == 1);
                assert_eq!(endpoint.kind == Kind::Sentinel, !endpoint.master.is_empty());
                let is_host = |address: &Address| {
                    !address.host.is_empty() && !address.host.contains(char::is_whitespace)
                };
                assert!(endpoint.addresses.iter().all(is_host));
            }
            // The password of any URL, wherever the rest of the text puts it. An error shows an unknown scheme.
            let Some((scheme, rest)) = url.split_once("://") else { return };
            if scheme.contains("Geheim7") {
                return;
            }
            let url = format!("{scheme}://user:Geheim7@{rest}");
            match Endpoint::read(&url) {
                Ok(endpoint) => {
                    // A later `@` makes the text before it a part of the password.
                    assert!(endpoint.password.is_some_and(|it| it.starts_with("Geheim7")));
                }
                Err(error) => {
                    use std::error::Error as _;

                    let source = error.source().expect("a reason");
                    let shown = format!("{error:?} {error} {source:?} {source}");
                    assert!(!shown.contains("Geheim7"), "{shown}");
                }
            }
        });
    }

    fn config_error(url: &str) -> ConfigError {
        use std::error::Error as _;

        let error = Endpoint::read(url).err().expect(url);
        assert!(!format!("{error:?} {error}").contains("secret"), "{url}");
        error.source().unwrap().downcast_ref::<ConfigError>().unwrap().clone()
    }

    fn addresses(url: &str) -> Vec<String> {
        Endpoint::read(url).expect(url).addresses.iter().map(Address::to_string).collect()
    }

    #[test]
    fn one_server_has_a_host_a_port_and_a_database() {
        let endpoint = Endpoint::read("redis://me:p%40ss%2Fw@db.example:7000/3").ok().unwrap();
        assert_eq!((endpoint.kind, endpoint.tls, endpoint.database), (Kind::Server, false, 3));
        assert_eq!(endpoint.username.as_deref(), Some("me"));
        assert_eq!(endpoint.password.as_deref(), Some("p@ss/w"));
        assert_eq!(addresses("redis://h"), ["h:6379"]);
        assert_eq!(addresses("valkey://:secret@[::1]"), ["[::1]:6379"]);
        assert_eq!(addresses("redis://[fe80::2]:7001/"), ["[fe80::2]:7001"]);
        let named = Endpoint::read("redis://:secret@h").ok().unwrap();
        assert_eq!((named.username, named.password.as_deref()), (None, Some("secret")));
    }

    #[test]
    fn sentinel_and_cluster_have_several_hosts() {
        let url = "redis+sentinel://u:p@a,b:1,[::1]:2/the%20master/4";
        let endpoint = Endpoint::read(url).ok().unwrap();
        assert_eq!((endpoint.kind, endpoint.database), (Kind::Sentinel, 4));
        assert_eq!(endpoint.master, "the master");
        assert_eq!(addresses(url), ["a:26379", "b:1", "[::1]:2"]);
        assert_eq!(addresses("redis+cluster://a,b:7"), ["a:6379", "b:7"]);
    }

    #[test]
    fn prefix_is_the_only_parameter() {
        let endpoint = Endpoint::read("redis://h?dedup_prefix=shop").ok().unwrap();
        assert_eq!(endpoint.prefix.unwrap(), "shop");
        assert_eq!(config_error("redis://h?protocol=resp3"), ConfigError::UnknownUrlParameter);
        assert_eq!(config_error("redis://:secret?x@h"), ConfigError::InvalidUrl);
        assert_eq!(config_error("redis://h?secret@h"), ConfigError::UnknownUrlParameter);
        assert!(matches!(
            config_error("redis://h?dedup_prefix=a%3Ab"),
            ConfigError::InvalidSetting { setting: "prefix", .. }
        ));
    }

    #[test]
    fn unreadable_urls_are_refused_without_their_text() {
        for url in [
            "redis:secret",
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
            assert_eq!(config_error(url), ConfigError::InvalidUrl, "{url}");
        }
        assert_eq!(config_error("redis://:secret@a,b"), ConfigError::SeveralRedisHosts);
        for url in ["redis+unix://h", "http://h", "postgres+cluster://h"] {
            assert!(matches!(config_error(url), ConfigError::UnknownScheme(_)), "{url}");
        }
    }

    #[test]
    #[cfg(not(any(feature = "tls-rustls-no-provider", feature = "tls-native-tls")))]
    fn tls_without_its_feature_names_the_feature() {
        let expected = ConfigError::FeatureDisabled { scheme: "rediss", feature: "tls-rustls" };
        for url in ["rediss://h", "rediss+sentinel://h/m", "valkeys+cluster://h"] {
            assert_eq!(config_error(url), expected);
        }
    }
}
