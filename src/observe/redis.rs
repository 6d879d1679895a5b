//! Records and counters of the Redis adapter.

use std::fmt::Display;

use super::error_text::chain;
use crate::error::Error;

/// Reports a loss. `since` is 0 if writes of any age may be lost.
pub(crate) fn store_loss(
    kind: &'static str,
    is_certain: bool,
    primary: &str,
    since_ms: u64,
    last_intact_ms: u64,
) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_store_losses_total", "kind" => kind).increment(1);
    if is_certain {
        tracing::error!(
            target: "tower_dedup",
            kind,
            primary,
            since_ms,
            last_intact_ms,
            "the store lost acknowledged writes: events of this time may run again"
        );
    } else {
        tracing::warn!(
            target: "tower_dedup",
            kind,
            primary,
            since_ms,
            last_intact_ms,
            "the store may have lost acknowledged writes: events of this time may run again"
        );
    }
}

/// Reports that losses cannot be looked for, because the store does not reply or refuses.
pub(crate) fn losses_not_followed(error: &Error) {
    tracing::warn!(
        target: "tower_dedup",
        error = chain(error),
        "losses of the store are not followed; it is tried again"
    );
}

/// Reports that losses are looked for again.
pub(crate) fn losses_followed_again() {
    tracing::info!(target: "tower_dedup", "losses of the store are followed again");
}

/// Reports that the server refuses `INFO`.
pub(crate) fn info_refused(error: &Error) {
    tracing::warn!(
        target: "tower_dedup",
        error = chain(error),
        "INFO is not permitted: a loss by a failover shows less often; allow `+info` to this user"
    );
}

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
pub(crate) fn redis_without_info() {
    tracing::warn!(
        target: "tower_dedup",
        "the Redis server refuses INFO: evictions and losses are not noticed"
    );
}
