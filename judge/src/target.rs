//! [`Target`]: a URL, resolved once, whose addresses are near.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http::Uri;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

/// How long to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// A server. Its name is resolved once, so that no later answer of the DNS leads elsewhere.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    addresses: Vec<SocketAddr>,
    /// The value of the header `Host`.
    pub(crate) authority: String,
    /// Path and query.
    pub(crate) path: String,
}

impl Target {
    /// Resolves the host of a URL. With `anywhere`, its addresses may be public.
    pub(crate) async fn resolve(url: &str, anywhere: bool) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error| format!("`{url}` is no URL: {error}"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err("https:// is not spoken: judge the receiver behind its TLS".to_owned());
            }
            _ => return Err(format!("`{url}` is no URL that begins with http://")),
        }
        let authority = uri.authority().filter(|it| !it.as_str().contains('@'));
        let authority = authority.ok_or("a URL has a host, and no user name")?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let port = authority.port_u16().unwrap_or(80);
        let found = lookup_host((host, port)).await;
        let found = found.map_err(|error| format!("`{host}` is not resolved: {error}"))?;
        let addresses: Vec<_> = found.collect();
        match addresses.iter().find(|address| !is_near(address.ip())) {
            Some(far) if !anywhere => Err(format!(
                "{host} is {}, outside of loopback and private networks: the judge attacks what it reaches; \
                 --i-own-this-host permits it",
                far.ip()
            )),
            _ if addresses.is_empty() => Err(format!("`{host}` has no address")),
            _ => Ok(Self {
                addresses,
                authority: authority.to_string(),
                path: uri.path_and_query().map_or("/", |it| it.as_str()).to_owned(),
            }),
        }
    }

    pub(crate) async fn connect(&self) -> io::Result<TcpStream> {
        let connected = timeout(CONNECT, TcpStream::connect(&self.addresses[..])).await;
        let stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// Returns `true` for loopback (`0.0.0.0` and `::` lead there), private networks (RFC 1918) and unique local addresses
/// (RFC 4193). Link-local addresses are far: one of them has the secrets of a machine in a cloud.
fn is_near(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_private() || v4.is_unspecified(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local() || v6.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_outside_of_loopback_and_private_networks_are_far() {
        let near = ["127.0.0.1", "127.9.9.9", "10.1.2.3", "172.31.0.1", "192.168.1.1", "0.0.0.0"];
        let near = near.into_iter().chain(["::1", "::", "fd00::1", "::ffff:10.0.0.1"]);
        let far = ["1.1.1.1", "172.32.0.1", "169.254.169.254", "100.64.0.1", "192.0.2.1"];
        let far = far.into_iter().chain(["2001:db8::1", "fe80::1", "::ffff:8.8.8.8"]);
        for (address, expected) in near.map(|it| (it, true)).chain(far.map(|it| (it, false))) {
            assert_eq!(is_near(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[tokio::test]
    async fn url_is_http_without_a_user() {
        for (url, words) in [
            ("https://localhost/", "behind its TLS"),
            ("localhost:3000", "http://"),
            ("http://user@localhost/", "no user name"),
        ] {
            let error = Target::resolve(url, false).await.unwrap_err();
            assert!(error.contains(words), "{url}: {error}");
        }
        assert!(Target::resolve("http://1.1.1.1/", true).await.is_ok());
    }
}
