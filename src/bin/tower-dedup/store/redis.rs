//! A Redis store: one server, Sentinel or Cluster.

use std::sync::Arc;
use std::time::Duration;

use tower_dedup::adapter::{RedisAdapter, RedisOptions};

use super::{Pools, Store, within};
use crate::failure::Failure;
use crate::options::Global;

/// The schemes of the URLs that name a Redis store.
pub(super) const SCHEMES: [&str; 6] = [
    "redis",
    "rediss",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
];

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
            .follow_every(None)
            .try_response_timeout(global.timeout)?
            .try_connect_timeout(global.timeout)?;
        Ok(Self { url: url.to_owned(), options, timeout: global.timeout })
    }

    pub(crate) async fn connect(&self) -> Result<RedisAdapter, Failure> {
        let connect = RedisAdapter::connect_with(&self.url, self.options.clone());
        within(self.timeout, async { Ok(connect.await?) }).await
    }

    pub(super) async fn open(&self) -> Result<Store, Failure> {
        let adapter = Arc::new(self.connect().await?);
        Ok(Store { adapter, timeout: self.timeout, pools: Pools::Redis })
    }

    /// Returns `true` if the URL asks for TLS.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.url.starts_with("rediss")
    }
}
