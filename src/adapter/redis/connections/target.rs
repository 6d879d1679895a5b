//! How a connection to a server is opened.

use std::sync::Once;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo,
};

use super::super::options::RedisOptions;
use super::super::url::Address;
use super::failure::Failure;
use super::fitness::ServerInfo;
use crate::error::{ConfigError, Error};
use crate::observe;

/// A connection that carries nothing is probed after this time, so that a dead one is noticed.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// After this time without an acknowledgement, the kernel gives up a connection and what it still has to send.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);

/// The connect timeout and the response timeout.
pub(super) type Timeouts = (Duration, Duration);

/// Returns a time that is longer than it takes to open a connection, and to send a command on it.
pub(super) fn longest_step(options: &RedisOptions) -> Duration {
    2 * (options.connect_timeout + options.response_timeout) + Duration::from_secs(1)
}

/// Returns the client of a server. Connects to nothing.
pub(super) fn client(
    address: &Address,
    tls: bool,
    redis: RedisConnectionInfo,
    options: &RedisOptions,
) -> Result<Client, Error> {
    let Address { host, port } = address.clone();
    let addr = if tls {
        ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host, port)
    };
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_INTERVAL);
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(UNACKNOWLEDGED);
    let invalid = |_| Error::from(ConfigError::InvalidUrl);
    let info = addr.into_connection_info().map_err(invalid)?;
    let info = info.set_redis_settings(redis).set_tcp_settings(tcp);
    #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
    if tls {
        return client_with_tls(info, options);
    }
    let _ = options;
    Client::open(info).map_err(invalid)
}

#[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
fn client_with_tls(info: redis::ConnectionInfo, options: &RedisOptions) -> Result<Client, Error> {
    // Without a provider, rustls panics at the first connection. `redis` takes that of the process.
    #[cfg(feature = "tls-rustls")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another task may have installed one just now.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let RedisOptions { root_certificates, client_certificate, .. } = options;
    if root_certificates.is_none() && client_certificate.is_none() {
        return Client::open(info).map_err(|_| ConfigError::InvalidUrl.into());
    }
    let client_tls = client_certificate
        .clone()
        .map(|(pem, key)| redis::ClientTlsConfig { client_cert: pem, client_key: key.0 });
    let certificates = redis::TlsCertificates { client_tls, root_cert: root_certificates.clone() };
    Client::build_with_tls(info, certificates).map_err(|error| {
        let rule = "certificates and a key as PEM";
        let setting = "root_certificates";
        let config = ConfigError::InvalidSetting { setting, rule };
        drop(error);
        config.into()
    })
}

/// Opens a connection, and asks the server what it is. Takes at most both timeouts together.
pub(super) async fn connect(
    client: &Client,
    (connect_timeout, response_timeout): Timeouts,
) -> Result<(MultiplexedConnection, Option<ServerInfo>), Failure> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect_timeout))
        .set_response_timeout(Some(response_timeout));
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    let info = ServerInfo::ask(&mut connection).await?;
    Ok((connection, info))
}

/// Warns once that the server does not say what it is.
pub(super) fn warn_without_info() {
    static WARNED: Once = Once::new();
    WARNED.call_once(observe::redis_without_info);
}
