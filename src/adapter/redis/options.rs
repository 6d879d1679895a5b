//! [`RedisOptions`].

use std::fmt;
use std::time::Duration;

use super::url::{Endpoint, checked_prefix};
use crate::error::{ConfigError, Error, check, valid};

/// The longest time of a setting. The end of each such time is an `Instant` that exists.
const LONGEST: Duration = Duration::from_secs(86_400);

/// How a [`RedisAdapter`](super::RedisAdapter) works. Set before the adapter exists.
///
/// | option | default |
/// |---|---|
/// | [`prefix`](Self::prefix) | `dedup` |
/// | [`call_timeout`](Self::call_timeout) | 1.8 s |
/// | [`response_timeout`](Self::response_timeout) | 1 s |
/// | [`connect_timeout`](Self::connect_timeout) | 500 ms |
/// | [`wait_replicas`](Self::wait_replicas) | off |
/// | [`evictable`](Self::evictable) | `false` |
/// | [`follow_every`](Self::follow_every) | 1 s |
#[derive(Debug, Clone)]
#[must_use]
pub struct RedisOptions {
    /// Before every key of Redis.
    pub(super) prefix: String,
    /// How long a call may take, with its repetitions.
    pub(super) call_timeout: Duration,
    /// How long one command may take.
    pub(super) response_timeout: Duration,
    /// How long a connection may take to open.
    pub(super) connect_timeout: Duration,
    /// Whether a server that evicts keys is accepted.
    pub(super) evictable: bool,
    /// How many replicas must have a write before it counts, and how long a call waits for them.
    pub(super) wait_replicas: Option<(u32, Duration)>,
    /// How often losses are looked for; `None` for never.
    pub(super) follow_every: Option<Duration>,
    pub(super) sentinel_username: Option<String>,
    pub(super) sentinel_password: Option<Secret>,
    /// Certificates of certificate authorities, as PEM.
    #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
    pub(super) root_certificates: Option<Vec<u8>>,
    /// A certificate of ours and its key, as PEM.
    #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
    pub(super) client_certificate: Option<(Vec<u8>, Secret)>,
}

impl RedisOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self {
            prefix: "dedup".to_owned(),
            call_timeout: Duration::from_millis(1800),
            response_timeout: Duration::from_secs(1),
            connect_timeout: Duration::from_millis(500),
            evictable: false,
            wait_replicas: None,
            follow_every: Some(Duration::from_secs(1)),
            sentinel_username: None,
            sentinel_password: None,
            #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
            root_certificates: None,
            #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
            client_certificate: None,
        }
    }

    /// Sets what every key of Redis begins with, so that several programs can share a server.
    ///
    /// The parameter `dedup_prefix` of the URL replaces it.
    ///
    /// # Panics
    ///
    /// Panics unless the prefix matches `[A-Za-z0-9_.-]{1,32}`.
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        valid(self.try_prefix(prefix))
    }

    /// Sets [`prefix`](Self::prefix).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`].
    pub fn try_prefix(mut self, prefix: &str) -> Result<Self, ConfigError> {
        self.prefix = checked_prefix(prefix)?;
        Ok(self)
    }

    /// Sets how long one call may take, with its repetitions.
    ///
    /// Within this time, a call is repeated after an error of the connection and after a refusal that
    /// passes, such as `LOADING`. Keep it below the layer's
    /// [`store_timeout`](crate::DedupLayer::store_timeout).
    ///
    /// # Panics
    ///
    /// Panics unless it is from 1 ms to 1 day.
    #[track_caller]
    pub fn call_timeout(self, bound: Duration) -> Self {
        valid(self.try_call_timeout(bound))
    }

    /// Sets [`call_timeout`](Self::call_timeout).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`].
    pub fn try_call_timeout(mut self, bound: Duration) -> Result<Self, ConfigError> {
        self.call_timeout = bounded(bound, "call_timeout")?;
        Ok(self)
    }

    /// Sets how long the server may take to reply to one command. Then the connection counts as broken.
    ///
    /// Keep it below [`call_timeout`](Self::call_timeout), so that a call whose connection fell silent
    /// has time for another connection.
    ///
    /// # Panics
    ///
    /// Panics unless it is from 1 ms to 1 day.
    #[track_caller]
    pub fn response_timeout(self, bound: Duration) -> Self {
        valid(self.try_response_timeout(bound))
    }

    /// Sets [`response_timeout`](Self::response_timeout).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`].
    pub fn try_response_timeout(mut self, bound: Duration) -> Result<Self, ConfigError> {
        self.response_timeout = bounded(bound, "response_timeout")?;
        Ok(self)
    }

    /// Sets how long a connection may take to open, with TLS and the password. A Sentinel has at most
    /// 250 ms of it.
    ///
    /// # Panics
    ///
    /// Panics unless it is from 1 ms to 1 day.
    #[track_caller]
    pub fn connect_timeout(self, bound: Duration) -> Self {
        valid(self.try_connect_timeout(bound))
    }

    /// Sets [`connect_timeout`](Self::connect_timeout).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`].
    pub fn try_connect_timeout(mut self, bound: Duration) -> Result<Self, ConfigError> {
        self.connect_timeout = bounded(bound, "connect_timeout")?;
        Ok(self)
    }

    /// Returns no result of a write before this many replicas have it, and waits for them for this
    /// time at most.
    ///
    /// If too few replicas have the write in time, the call fails with
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable), and its outcome is unknown. This makes
    /// the loss of a write by a failover less likely. It does not exclude the loss, because the
    /// failover may choose a replica that does not have the write.
    ///
    /// # Panics
    ///
    /// Panics if `replicas` is 0, or unless `bound` is from 1 ms to 1 day.
    #[track_caller]
    pub fn wait_replicas(self, replicas: u32, bound: Duration) -> Self {
        valid(self.try_wait_replicas(replicas, bound))
    }

    /// Sets [`wait_replicas`](Self::wait_replicas).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`].
    pub fn try_wait_replicas(
        mut self,
        replicas: u32,
        bound: Duration,
    ) -> Result<Self, ConfigError> {
        check(replicas > 0, "wait_replicas", "at least 1 replica")?;
        self.wait_replicas = Some((replicas, bounded(bound, "wait_replicas")?));
        Ok(self)
    }

    /// Accepts a server that evicts keys when its memory is full.
    ///
    /// An evicted key is forgotten: its event runs again, and two handlers of it may run at once. By
    /// default such a server is refused.
    pub fn evictable(mut self, accepted: bool) -> Self {
        self.evictable = accepted;
        self
    }

    /// Sets how often the adapter looks for losses of the store; `None` for never.
    ///
    /// # Panics
    ///
    /// Panics unless it is from 100 ms to 1 day.
    #[track_caller]
    pub fn follow_every(self, interval: Option<Duration>) -> Self {
        valid(self.try_follow_every(interval))
    }

    /// Sets [`follow_every`](Self::follow_every).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`].
    pub fn try_follow_every(mut self, interval: Option<Duration>) -> Result<Self, ConfigError> {
        let range = Duration::from_millis(100)..=LONGEST;
        let is_valid = interval.is_none_or(|interval| range.contains(&interval));
        check(is_valid, "follow_every", "100 ms to 1 day")?;
        self.follow_every = interval;
        Ok(self)
    }

    /// Sets the password of the Sentinels. The password of the URL is the one of the servers.
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Self {
        self.sentinel_password = Some(Secret(password.into().into_bytes()));
        self
    }

    /// Sets the user name for the Sentinels. It needs a
    /// [`sentinel_password`](Self::sentinel_password).
    pub fn sentinel_username(mut self, name: impl Into<String>) -> Self {
        self.sentinel_username = Some(name.into());
        self
    }

    /// Trusts the certificate authorities in this PEM text, and no others.
    ///
    /// Without it, the trusted authorities are those of Mozilla with the feature `tls-rustls`, and those
    /// of the platform with `tls-native-tls`.
    #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
    pub fn root_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.root_certificates = Some(pem.into());
        self
    }

    /// Shows this certificate to servers that ask for one. Both texts are PEM.
    #[cfg(any(feature = "tls-rustls", feature = "tls-native-tls"))]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.client_certificate = Some((pem.into(), Secret(key.into())));
        self
    }

    /// Returns these options with those of the URL.
    pub(super) fn with_url(mut self, url: &str) -> Result<Self, Error> {
        if let Some(prefix) = Endpoint::read(url)?.prefix {
            self.prefix = prefix;
        }
        Ok(self)
    }

    /// Checks what two setters determine together.
    pub(super) fn checked(&self) -> Result<(), ConfigError> {
        let fits = self.wait_replicas.is_none_or(|(_, bound)| bound < self.call_timeout);
        check(fits, "wait_replicas", "shorter than `call_timeout`")
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self::new()
    }
}

fn bounded(bound: Duration, setting: &'static str) -> Result<Duration, ConfigError> {
    check((Duration::from_millis(1)..=LONGEST).contains(&bound), setting, "1 ms to 1 day")?;
    Ok(bound)
}

/// A password or a private key. `Debug` does not show it.
#[derive(Clone)]
pub(super) struct Secret(pub(super) Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_bounded() {
        let day = Duration::from_secs(86_400);
        for (bound, is_valid) in
            [(Duration::ZERO, false), (day, true), (day + Duration::from_nanos(1), false)]
        {
            let settings = [
                RedisOptions::new().try_call_timeout(bound),
                RedisOptions::new().try_response_timeout(bound),
                RedisOptions::new().try_connect_timeout(bound),
                RedisOptions::new().try_wait_replicas(1, bound),
                RedisOptions::new().try_follow_every(Some(bound)),
            ];
            for result in settings {
                assert_eq!(result.is_ok(), is_valid, "{bound:?} {result:?}");
            }
        }
    }
}
