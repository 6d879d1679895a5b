//! Descriptions and recommended buckets of the metrics.

use metrics::Unit::{self, Count, Seconds};

enum Kind {
    Counter,
    Gauge,
    Histogram,
}
use Kind::{Counter, Gauge, Histogram};

/// Every metric, in the order of the table in the documentation.
const METRICS: &[(&str, Kind, Unit, &str)] = &[
    ("tower_dedup_deliveries_total", Counter, Count, "Deliveries by outcome"),
    ("tower_dedup_running", Gauge, Count, "Deliveries that have begun and not ended"),
    (
        "tower_dedup_waiting",
        Gauge,
        Count,
        "Deliveries that wait for another delivery of their event, or for a permit",
    ),
    (
        "tower_dedup_pending_writes",
        Gauge,
        Count,
        "Store calls of ended deliveries that have not reached the store",
    ),
    (
        "tower_dedup_delivery_duration_seconds",
        Histogram,
        Seconds,
        "Time from the head of the request to the head of the response",
    ),
    ("tower_dedup_store_duration_seconds", Histogram, Seconds, "Duration of store calls"),
    (
        "tower_dedup_duplicate_age_seconds",
        Histogram,
        Seconds,
        "Time since the event of a duplicate was first seen",
    ),
    ("tower_dedup_first_attempts_total", Counter, Count, "First attempts that ended, by result"),
    ("tower_dedup_takeovers_total", Counter, Count, "Runs after another lease lapsed"),
    ("tower_dedup_leases_lost_total", Counter, Count, "Handlers that lost their lease"),
    (
        "tower_dedup_unprotected_total",
        Counter,
        Count,
        "Handlers that ran although the store did not reply",
    ),
    (
        "tower_dedup_other_path_total",
        Counter,
        Count,
        "Duplicates that came on another path than their event",
    ),
    ("tower_dedup_mismatches_total", Counter, Count, "Events that came again with another payload"),
    (
        "tower_dedup_responses_not_stored_total",
        Counter,
        Count,
        "Responses that were to be stored and cannot be",
    ),
    (
        "tower_dedup_background_total",
        Counter,
        Count,
        "Store calls that ended after their delivery, by result",
    ),
    (
        "tower_dedup_lane_restarts_total",
        Counter,
        Count,
        "Connections of the queue's lanes that were lost and opened again",
    ),
    ("tower_dedup_shadow_total", Counter, Count, "Deliveries in shadow by verdict"),
    ("tower_dedup_purged_total", Counter, Count, "Expired keys that were deleted"),
    (
        "tower_dedup_last_purge_timestamp_seconds",
        Gauge,
        Seconds,
        "Unix time at which the last round of a purge succeeded",
    ),
    ("tower_dedup_rows", Gauge, Count, "Keys in the store by state, at the last round of a purge"),
    (
        "tower_dedup_expired_rows",
        Gauge,
        Count,
        "Expired keys that the last round of a purge did not delete",
    ),
    (
        "tower_dedup_oldest_lapsed_seconds",
        Gauge,
        Seconds,
        "Time since the oldest lapsed lease lapsed, at the last round of a purge",
    ),
    (
        "tower_dedup_table_bytes",
        Gauge,
        Unit::Bytes,
        "Size of the table with its indexes, or of the file",
    ),
    (
        "tower_dedup_evicted_total",
        Counter,
        Count,
        "Live keys that a full memory store has forgotten",
    ),
    (
        "tower_dedup_store_losses_total",
        Counter,
        Count,
        "Signs of lost writes that a store has shown, by kind",
    ),
];

/// Describes every metric of this crate, with its unit, to the recorder of the
/// [`metrics`](https://docs.rs/metrics) facade. Call it once, after the recorder is installed.
///
/// Without it, the metrics are recorded and have no description.
pub fn describe_metrics() {
    for &(name, ref kind, unit, text) in METRICS {
        match kind {
            Counter => metrics::describe_counter!(name, unit, text),
            Gauge => metrics::describe_gauge!(name, unit, text),
            Histogram => metrics::describe_histogram!(name, unit, text),
        }
    }
}

/// Returns the recommended upper bounds of the buckets, in seconds, of each histogram by name.
///
/// - `tower_dedup_delivery_duration_seconds`: 1 ms to 60 s. A duplicate takes about as long as one
///   store call. Senders give up after 5 s to 30 s, so a slow handler is above the limit of its
///   sender.
/// - `tower_dedup_store_duration_seconds`: 0.2 ms to 5 s. A claim in the same data centre takes 0.2 ms
///   to 5 ms. The default of [`store_timeout`](crate::DedupLayer::store_timeout) is 2 s.
/// - `tower_dedup_duplicate_age_seconds`: 1 s to 60 days. The bounds contain the retentions that are
///   common: 1, 3, 7, 14, 30 and 60 days. If duplicates reach the bucket of the retention, the
///   retention is too short.
///
/// Each list has 12 to 14 bounds, because every label combination costs one series for each bound.
#[must_use]
pub fn metrics_buckets() -> &'static [(&'static str, &'static [f64])] {
    const DAY: f64 = 86_400.0;
    &[
        (
            "tower_dedup_delivery_duration_seconds",
            &[0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0],
        ),
        (
            "tower_dedup_store_duration_seconds",
            &[
                0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0,
                5.0,
            ],
        ),
        (
            "tower_dedup_duplicate_age_seconds",
            &[
                1.0,
                10.0,
                60.0,
                600.0,
                3_600.0,
                21_600.0,
                DAY,
                3.0 * DAY,
                7.0 * DAY,
                14.0 * DAY,
                30.0 * DAY,
                60.0 * DAY,
            ],
        ),
    ]
}
