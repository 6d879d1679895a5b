//! Records and counters of purges.

use super::error_text::chain;
use crate::error::Error;

/// Counts expired keys that were deleted.
pub(crate) fn purged(keys: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_purged_total").increment(keys);
    tracing::debug!(target: "tower_dedup", keys, "purged");
}

/// Reports a failed round of a purge, at WARN if it is the first one after a success.
pub(crate) fn purge_failed(error: &Error, is_first: bool) {
    let error = chain(error);
    if is_first {
        tracing::warn!(target: "tower_dedup", error, "purging failed; it is tried again");
    } else {
        tracing::debug!(target: "tower_dedup", error, "purging failed; it is tried again");
    }
}
