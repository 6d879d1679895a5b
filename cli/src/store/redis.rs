//! A Redis store: one server, Sentinel or Cluster.

use std::time::Duration;

use tower_dedup::adapter::{RedisAdapter, RedisOptions};

use crate::failure::{Failure, within};
use crate::options::Global;

/// Returns `true` for the URL of a Redis store.
pub(super) fn is_redis(scheme: &str) -> bool {
    let (server, _) = scheme.split_once('+').unwrap_or((scheme, ""));
    matches!(server, "redis" | "rediss" | "valkey" | "valkeys")
}

pub(crate) struct Redis {
    pub(crate) url: String,
    options: RedisOptions,
    pub(crate) timeout: Duration,
}

impl Redis {
    /// Reads the options. Connects to nothing.
    pub(super) fn new(url: &str, global: &Global) -> Result<Self, Failure> {
        if global.table.is_some() || global.schema.is_some() {
            return Err(Failure::usage(
                "a Redis store has no table: the URL's parameter dedup_prefix names other keys",
            ));
        }
        let options = RedisOptions::new()
            // `doctor` reports it. The other commands work on such a server too.
            .evictable(true)
            .call_timeout(global.timeout)
            .response_timeout(global.timeout)
            .connect_timeout(global.timeout);
        Ok(Self { url: url.to_owned(), options, timeout: global.timeout })
    }

    pub(crate) async fn connect(&self) -> Result<RedisAdapter, Failure> {
        let connect = RedisAdapter::connect_with(&self.url, self.options.clone());
        within(self.timeout, async { Ok(connect.await?) }).await
    }

    /// Returns the scheme without what names the topology, and the topology.
    pub(crate) fn scheme(&self) -> (&str, &str) {
        let scheme = self.url.split(':').next().unwrap_or_default();
        scheme.split_once('+').unwrap_or((scheme, ""))
    }

    /// Returns what all keys begin with.
    pub(super) fn prefix(&self) -> String {
        let query = self.url.split_once("dedup_prefix=").map_or("dedup", |(_, prefix)| prefix);
        query.split('&').next().unwrap_or_default().to_owned()
    }
}
