//! The log records of the Redis adapter.

use std::fmt::Display;

use super::error_text::chain;

/// Reports that calls are refused until the server is mended.
pub(crate) fn redis_is_unfit(server: &impl Display, fault: &(dyn std::error::Error + 'static)) {
    tracing::error!(
        target: "tower_dedup",
        server = %server,
        error = chain(fault),
        "the Redis server may not be used: every call is refused until it is mended"
    );
}

/// Reports that a server does not say whether it evicts keys.
pub(crate) fn redis_hides_its_policy() {
    tracing::warn!(
        target: "tower_dedup",
        "the Redis server hides its eviction policy: set it to noeviction"
    );
}
