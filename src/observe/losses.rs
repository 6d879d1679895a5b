//! Records and counters of writes that a store has lost.

use crate::key::DedupKey;

/// Reports that the row of a claim of this process was gone when its completion came.
pub(crate) fn claim_missing(key: &DedupKey) {
    count("missing");
    log!(
        ERROR,
        key,
        kind = "missing",
        "the store lost a claim: another handler may have run this event too"
    );
}

/// Reports that a server shows signs of a loss.
#[cfg(feature = "redis")]
pub(crate) fn store_loss_suspected(kind: &'static str, primary: &str) {
    count(kind);
    tracing::warn!(
        target: "tower_dedup",
        kind,
        primary,
        "the store may have lost acknowledged writes: events of the last time may run again"
    );
}

fn count(kind: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!("tower_dedup_store_losses_total", "kind" => kind).increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = kind;
}
