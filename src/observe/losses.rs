//! Records and counters of writes that a store has lost.

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
