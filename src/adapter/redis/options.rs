//! [`RedisOptions`].

use std::time::Duration;

use crate::error::{ConfigError, check};

/// The longest time of a setting. The end of each such time is an `Instant` that exists.
const LONGEST: Duration = Duration::from_secs(86_400);

/// How a [`RedisAdapter`](super::RedisAdapter) works. Checked when the adapter is made.
#[derive(Debug, Clone)]
#[must_use]
pub struct RedisOptions {
    pub(super) prefix: String,
    pub(super) call_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) evictable: bool,
    pub(super) wait_replicas: Option<(u32, Duration)>,
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
        }
    }

    /// Sets the prefix of every key in Redis, so that several programs can share a server:
    /// `[A-Za-z0-9_.-]{1,32}`; `dedup` by default.
    ///
    /// The parameter `dedup_prefix` of the URL replaces it.
    pub fn prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.prefix);
        self
    }

    /// Sets how long one call may take, with its repetitions: from 1 ms to 1 day; 1.8 s by default.
    ///
    /// Within this time, a call is repeated after an error of the connection and after a temporary
    /// refusal, such as `LOADING`. Keep it below the layer's
    /// [`store_timeout`](crate::DedupLayer::store_timeout).
    pub fn call_timeout(mut self, bound: Duration) -> Self {
        self.call_timeout = bound;
        self
    }

    /// Sets how long the server may take to reply to one command: from 1 ms to 1 day; 1 s by
    /// default. Then the connection is replaced.
    ///
    /// Keep it below [`call_timeout`](Self::call_timeout), so that a call whose connection has
    /// become silent has time for another connection.
    pub fn response_timeout(mut self, bound: Duration) -> Self {
        self.response_timeout = bound;
        self
    }

    /// Sets how long a connection may take to open, with TLS and the password: from 1 ms to 1 day;
    /// 500 ms by default.
    ///
    /// A Sentinel has times of its own, which `redis` sets: 1 s to connect and 500 ms to reply.
    pub fn connect_timeout(mut self, bound: Duration) -> Self {
        self.connect_timeout = bound;
        self
    }

    /// Returns no result of a write before this many replicas have it, at least 1, and waits for
    /// them for this time at most: from 1 ms to less than [`call_timeout`](Self::call_timeout).
    ///
    /// If too few replicas have the write in time, the call fails with
    /// [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable), and its outcome is
    /// unknown. This makes the loss of a write by a failover less likely. It does not exclude the
    /// loss, because the failover may choose a replica that does not have the write.
    ///
    /// Without it, a failover can lose the release of an on-arrival claim, and with it the event.
    ///
    /// At most 8 calls of an adapter wait at the same time. They have connections of their own.
    pub fn wait_replicas(mut self, replicas: u32, bound: Duration) -> Self {
        self.wait_replicas = Some((replicas, bound));
        self
    }

    /// Accepts a server that evicts keys when its memory is full.
    ///
    /// An evicted key is forgotten: its event runs again, and two handlers of it may run at once.
    /// By default such a server is refused.
    pub fn evictable(mut self, accepted: bool) -> Self {
        self.evictable = accepted;
        self
    }

    /// Returns how long a command may take, with its wait for replicas.
    pub(super) fn reply_timeout(&self) -> Duration {
        self.response_timeout + self.wait_replicas.map_or(Duration::ZERO, |(_, bound)| bound)
    }

    /// Returns these options, if each is valid and they fit together.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first option with an invalid value. Without this call, it is the
    /// error of every call to the store.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        let is_prefix = matches!(self.prefix.len(), 1..=32) && self.prefix.bytes().all(is_part);
        if !is_prefix {
            // Without its value: a URL may have its password in the wrong place.
            let rule = "1 to 32 characters of `A-Z a-z 0-9 _ . -`";
            return Err(ConfigError::setting("prefix", rule));
        }
        bounded(self.call_timeout, "call_timeout")?;
        bounded(self.response_timeout, "response_timeout")?;
        bounded(self.connect_timeout, "connect_timeout")?;
        if let Some((replicas, bound)) = self.wait_replicas {
            check(replicas > 0, "wait_replicas", "at least 1 replica", &replicas)?;
            bounded(bound, "wait_replicas")?;
            let is_shorter = bound < self.call_timeout;
            check(is_shorter, "wait_replicas", "shorter than `call_timeout`", &bound)?;
        }
        Ok(())
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self::new()
    }
}

fn bounded(bound: Duration, setting: &'static str) -> Result<(), ConfigError> {
    let fits = (Duration::from_millis(1)..=LONGEST).contains(&bound);
    check(fits, setting, "1 ms to 1 day", &bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        let (new, ms, day) = (RedisOptions::new, Duration::from_millis(1), LONGEST);
        let more = day + Duration::from_nanos(1);
        for (options, is_valid) in [
            (new(), true),
            (new().call_timeout(day).response_timeout(day).connect_timeout(day), true),
            (new().call_timeout(Duration::ZERO), false),
            (new().call_timeout(more), false),
            (new().response_timeout(Duration::ZERO), false),
            (new().response_timeout(more), false),
            (new().connect_timeout(Duration::ZERO), false),
            (new().connect_timeout(more), false),
            (new().prefix(""), false),
            (new().prefix("a:b"), false),
            (new().wait_replicas(0, ms), false),
            (new().wait_replicas(1, 2_000 * ms), false),
        ] {
            assert_eq!(options.clone().checked().is_ok(), is_valid, "{options:?}");
        }
    }
}
