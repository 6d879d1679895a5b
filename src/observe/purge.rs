//! Records and counters of purges.

use std::time::Duration;

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

/// Reports that no round of a purge has succeeded for this long.
pub(crate) fn purge_stuck(error: &Error, since: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        since_s = since.as_secs(),
        error = chain(error),
        "purging does not succeed: expired keys stay, and the store grows"
    );
}

/// Reports that the role of an adapter may not delete rows.
#[cfg(feature = "postgres")]
pub(crate) fn purge_not_permitted(error: &Error) {
    tracing::warn!(
        target: "tower_dedup",
        error = chain(error),
        "purging is not permitted: GRANT DELETE on the table to this role, or purge as another role \
         and set `Purging::off()`"
    );
}
