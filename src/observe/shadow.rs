//! Records and metrics of [`Mode`](crate::Mode).

/// The fields of the log record of a delivery in shadow.
pub(crate) struct ShadowFields {
    pub(crate) verdict: &'static str,
    /// Whether the layer would have refused the delivery because of a fault.
    pub(crate) is_fault: bool,
    /// The beginning of the payload's SHA-256, in hex.
    pub(crate) payload: String,
}

/// Counts a delivery in shadow.
pub(crate) fn shadow(namespace: &str, verdict: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!(
        "tower_dedup_shadow_total",
        "namespace" => namespace.to_owned(),
        "verdict" => verdict
    )
    .increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = (namespace, verdict);
}

/// Reports that the mode of a layer has changed.
pub(crate) fn mode_changed(namespace: &str, from: &'static str, to: &'static str) {
    tracing::info!(target: "tower_dedup", namespace, from, to, "mode changed");
}
