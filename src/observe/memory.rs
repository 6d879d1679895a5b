//! Records and counters of the memory store.

use std::time::Duration;

/// Counts live keys that a store has forgotten.
pub(crate) fn evicted(keys: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_evicted_total").increment(keys);
    #[cfg(not(feature = "metrics"))]
    let _ = keys;
}

/// Reports that a store has forgotten live keys; `age` is the age of the youngest.
pub(crate) fn evicting(keys: u64, age: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        keys,
        age_s = age.as_secs(),
        "evicted: the memory store is full and forgets events that may be delivered again"
    );
}

/// Reports that a store is nearly full.
pub(crate) fn nearly_full() {
    tracing::warn!(
        target: "tower_dedup",
        "nearly full: the memory store has reached four fifths of its capacity"
    );
}
