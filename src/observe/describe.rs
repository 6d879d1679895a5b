//! Descriptions and recommended buckets of the metrics.

use metrics::Unit;

/// Every metric: the table in the documentation.
const METRICS: &str = include_str!("metrics.md");

/// Describes every metric of this crate, with its unit, to the recorder of the
/// [`metrics`](https://docs.rs/metrics) facade. Call it once, after the recorder is installed.
///
/// Without it, the metrics are recorded and have no description.
pub fn describe_metrics() {
    for row in METRICS.lines().skip(2) {
        let mut cells = row.split('|').map(str::trim).skip(1);
        let [name, kind, _labels, meaning] = std::array::from_fn(|_| cells.next().unwrap_or(""));
        let name = name.trim_matches('`');
        let unit = match name.rsplit('_').next() {
            Some("seconds") => Unit::Seconds,
            Some("bytes") => Unit::Bytes,
            _ => Unit::Count,
        };
        match kind {
            "counter" => metrics::describe_counter!(name, unit, meaning),
            "gauge" => metrics::describe_gauge!(name, unit, meaning),
            _ => metrics::describe_histogram!(name, unit, meaning),
        }
    }
}

/// Returns the recommended upper bounds of the buckets, in seconds, of each histogram by name.
///
/// - `tower_dedup_delivery_duration_seconds`: 1 ms to 60 s. A duplicate takes about as long as one
///   store call. Senders give up after 5 s to 30 s, so a slow handler is above the limit of its
///   sender.
/// - `tower_dedup_store_duration_seconds`: 0.2 ms to 5 s. A claim in the same data centre takes 0.2
///   ms to 5 ms. The default of [`store_timeout`](crate::DedupLayer::store_timeout) is 2 s.
/// - `tower_dedup_duplicate_age_seconds`: 1 s to 60 days. The bounds contain the retentions that
///   are common: 1, 3, 7, 14, 30 and 60 days. If duplicates reach the bucket of the retention, the
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
