//! Calls of the Redis adapter.

use std::error::Error as _;
use std::sync::Arc;

use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter};
use tower_dedup::adapter::{RedisAdapter, RedisOptions};
use tower_dedup::{ConfigError, StoreError};

use support::dedup_key;
use support::redis::fresh_prefix;

pub(crate) fn options() -> RedisOptions {
    RedisOptions::new().prefix(&fresh_prefix())
}

pub(crate) async fn connect(url: &str) -> Arc<RedisAdapter> {
    Arc::new(RedisAdapter::connect_with(url, options()).await.unwrap())
}

pub(crate) async fn claim(
    adapter: &RedisAdapter,
    id: &str,
    terms: &CallTerms,
) -> Result<ClaimReply, StoreError> {
    adapter.claim(&dedup_key(id), terms).await
}

/// Returns the attempt of a claim that was granted.
#[track_caller]
pub(crate) fn attempt(claimed: Result<ClaimReply, StoreError>) -> u32 {
    match claimed {
        Ok(ClaimReply::First { attempt, .. }) => attempt,
        other => panic!("not claimed: {other:?}"),
    }
}

pub(crate) fn config_error(error: &StoreError) -> &ConfigError {
    error.source().unwrap().downcast_ref().unwrap_or_else(|| panic!("{error:?}"))
}
