//! [`RedisOptions`].

use std::time::Duration;

/// How a [`RedisAdapter`](super::RedisAdapter) works. Set before the adapter exists.
#[derive(Debug, Clone)]
#[must_use]
pub struct RedisOptions {
    /// Before every key of Redis.
    pub(super) prefix: String,
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
}

impl RedisOptions {
    /// Returns the defaults: the prefix `dedup`, 1 s for a command, 500 ms for a connection.
    pub fn new() -> Self {
        Self {
            prefix: "dedup".to_owned(),
            response_timeout: Duration::from_secs(1),
            connect_timeout: Duration::from_millis(500),
            evictable: false,
            wait_replicas: None,
            follow_every: Some(Duration::from_secs(1)),
        }
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self::new()
    }
}
