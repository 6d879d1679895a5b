//! What a test measures: the log and the metrics of its thread. `tests/stores` has it, too.

use std::collections::BTreeMap;

use metrics::Unit;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

use support::log::Log;

/// Runs on one thread whose clock advances by itself, with a log and metrics of its own. Every metric has to be
/// described.
pub(crate) fn observed(run: impl AsyncFnOnce(Log, Snapshotter)) {
    use tracing_subscriber::layer::SubscriberExt;
    let (log, recorder) = (Log::default(), DebuggingRecorder::new());
    let snapshotter = recorder.snapshotter();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().unwrap();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    tracing::subscriber::with_default(subscriber, || {
        metrics::with_local_recorder(&recorder, || {
            tower_dedup::observe::describe_metrics();
            runtime.block_on(run(log, snapshotter));
        });
    });
    for (key, unit, text, _) in recorder.snapshotter().snapshot().into_vec() {
        assert!(unit.is_some() && text.is_some(), "not described: {key:?}");
        assert_eq!(unit == Some(Unit::Seconds), key.key().name().ends_with("_seconds"), "{key:?}");
    }
}

/// The sum of every counter and gauge, and the count of every histogram, by name and labels.
pub(crate) type Sums = BTreeMap<(String, Vec<String>), f64>;

pub(crate) fn measured(snapshotter: &Snapshotter) -> Sums {
    let mut sums = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels = key.labels().map(|label| label.value().to_owned()).collect();
        let value = match value {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(gauge) => gauge.into_inner(),
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            DebugValue::Histogram(samples) => samples.len() as f64,
        };
        sums.insert((key.name().to_owned(), labels), value);
    }
    sums
}

/// Returns one value, or zero for a metric without one.
pub(crate) fn value(sums: &Sums, name: &str, labels: &[&str]) -> f64 {
    let labels = labels.iter().map(|&label| label.to_owned()).collect();
    sums.get(&(name.to_owned(), labels)).copied().unwrap_or_default()
}
