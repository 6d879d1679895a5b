//! [`Meters`]: the metrics of one layer.

use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::event::count;
#[cfg(feature = "metrics")]
use super::outcome::Outcome;
use crate::key::DedupKey;

/// The keys of the metrics of one layer.
///
/// A metric's key is composed and hashed text. Making it for every delivery costs more than
/// counting. The recorder is looked up each time, because it may be installed late.
pub(crate) struct Meters {
    pub(super) namespace: Arc<str>,
    /// `true` once `nested layers` was logged.
    logged_nested: AtomicBool,
    /// When `handled on another path` was logged last.
    logged_other_path: Mutex<Option<Instant>>,
    #[cfg(feature = "metrics")]
    running: metrics::Key,
    /// Indexed by outcome.
    #[cfg(feature = "metrics")]
    ended: [OnceLock<Ended>; Outcome::Bypass as usize + 1],
}

/// The metrics' keys of one outcome.
#[cfg(feature = "metrics")]
struct Ended {
    deliveries: metrics::Key,
    durations: metrics::Key,
}

#[cfg(feature = "metrics")]
static METADATA: metrics::Metadata<'_> =
    metrics::Metadata::new(module_path!(), metrics::Level::INFO, Some(module_path!()));

impl Meters {
    pub(crate) fn new(namespace: &Arc<str>) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            logged_nested: AtomicBool::new(false),
            logged_other_path: Mutex::default(),
            #[cfg(feature = "metrics")]
            running: key("tower_dedup_running", namespace, None),
            #[cfg(feature = "metrics")]
            ended: std::array::from_fn(|_| OnceLock::new()),
        }
    }

    /// Reports that an outer layer already runs a request. Logs once, because every request of this
    /// layer is concerned.
    pub(crate) fn nested(&self) {
        if !self.logged_nested.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "tower_dedup",
                namespace = &*self.namespace,
                "nested layers: an outer layer deduplicates these requests by the same keys; this layer lets them through"
            );
        }
    }

    /// Reports a duplicate that came on another path than the path on which its event was handled.
    pub(crate) fn handled_on_another_path(&self, key: &DedupKey) {
        const PAUSE: Duration = Duration::from_secs(60);
        count("tower_dedup_other_path_total", key);
        let mut logged = self.logged_other_path.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_some_and(|logged| logged.elapsed() < PAUSE) {
            return;
        }
        *logged = Some(Instant::now());
        drop(logged);
        log!(
            ERROR,
            key,
            "handled on another path: this event is a duplicate here, and this path's handler has not run; give each route that has to see it a namespace of its own"
        );
    }

    /// Counts a delivery as running until the returned guard is dropped.
    pub(crate) fn running(&self) -> Running {
        Running {
            #[cfg(feature = "metrics")]
            gauge: {
                let gauge =
                    metrics::with_recorder(|to| to.register_gauge(&self.running, &METADATA));
                gauge.increment(1.0);
                gauge
            },
        }
    }

    #[cfg(feature = "metrics")]
    pub(super) fn count(&self, outcome: Outcome, took: Duration) {
        let ended = self.ended[outcome as usize].get_or_init(|| Ended {
            deliveries: key("tower_dedup_deliveries_total", &self.namespace, Some(outcome)),
            durations: key("tower_dedup_delivery_duration_seconds", &self.namespace, Some(outcome)),
        });
        metrics::with_recorder(|to| {
            to.register_counter(&ended.deliveries, &METADATA).increment(1);
            to.register_histogram(&ended.durations, &METADATA).record(took);
        });
    }
}

#[cfg(feature = "metrics")]
fn key(name: &'static str, namespace: &Arc<str>, outcome: Option<Outcome>) -> metrics::Key {
    // Shared, so that the recorder does not copy it.
    let namespace = metrics::SharedString::from_shared(Arc::clone(namespace));
    let mut labels = vec![metrics::Label::new("namespace", namespace)];
    labels.extend(outcome.map(|outcome| metrics::Label::new("outcome", outcome.as_str())));
    metrics::Key::from_parts(name, labels)
}

impl std::fmt::Debug for Meters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meters").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// Counts a delivery as running until it is dropped.
pub(crate) struct Running {
    #[cfg(feature = "metrics")]
    gauge: metrics::Gauge,
}

impl Drop for Running {
    fn drop(&mut self) {
        #[cfg(feature = "metrics")]
        self.gauge.decrement(1.0);
    }
}
