//! [`Meters`]: the metrics of one namespace.

use std::collections::HashMap;
use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[cfg(feature = "metrics")]
use super::endings::Outcome;
use crate::key::LogIds;

/// The metrics' keys of one layer, or of one namespace of a deduplicator.
///
/// A metric's key is composed and hashed text. Making it for every delivery costs more than
/// counting. The recorder is looked up each time, because it may be installed late.
pub(crate) struct Meters {
    pub(super) namespace: Arc<str>,
    /// How log records name the ids of the keys.
    pub(crate) log_ids: LogIds,
    /// The sender does not deliver again after a response.
    pub(super) is_tried_once: bool,
    /// `true` once `nested layers` was logged.
    logged_nested: AtomicBool,
    /// `true` once `nobody verifies` was logged.
    logged_unverified: AtomicBool,
    /// When `handled on another path` was logged last.
    logged_other_path: Mutex<Option<Instant>>,
    #[cfg(feature = "metrics")]
    keys: MetricKeys,
}

/// The metrics' keys of one namespace.
#[cfg(feature = "metrics")]
struct MetricKeys {
    running: metrics::Key,
    waiting: metrics::Key,
    duplicate_age: metrics::Key,
    /// The counters of failed and of completed first attempts.
    first_attempts: [metrics::Key; 2],
    /// The number of deliveries and their duration, by outcome. Boxed, because a namespace sees few
    /// outcomes.
    ended: [OnceLock<Box<[metrics::Key; 2]>>; Outcome::COUNT],
}

#[cfg(feature = "metrics")]
static METADATA: metrics::Metadata<'_> =
    metrics::Metadata::new(module_path!(), metrics::Level::INFO, Some(module_path!()));

impl Meters {
    pub(crate) fn new(namespace: &Arc<str>, is_tried_once: bool, log_ids: LogIds) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            log_ids,
            is_tried_once,
            logged_nested: AtomicBool::new(false),
            logged_unverified: AtomicBool::new(false),
            logged_other_path: Mutex::default(),
            #[cfg(feature = "metrics")]
            keys: MetricKeys {
                running: key("tower_dedup_running", namespace, None),
                waiting: key("tower_dedup_waiting", namespace, None),
                duplicate_age: key("tower_dedup_duplicate_age_seconds", namespace, None),
                first_attempts: ["failed", "completed"].map(|result| {
                    key("tower_dedup_first_attempts_total", namespace, Some(("result", result)))
                }),
                ended: std::array::from_fn(|_| OnceLock::new()),
            },
        }
    }

    /// Returns `true` the first time. Every request of a layer within a layer of the same keys is
    /// concerned.
    pub(crate) fn is_first_nested(&self) -> bool {
        !self.logged_nested.swap(true, Ordering::Relaxed)
    }

    /// Returns `true` the first time, if `is_unverified` does. It is not asked again after that.
    pub(crate) fn is_first_unverified(&self, is_unverified: impl FnOnce() -> bool) -> bool {
        let logged = &self.logged_unverified;
        !logged.load(Ordering::Relaxed) && is_unverified() && !logged.swap(true, Ordering::Relaxed)
    }

    /// Counts a duplicate that came on another path than the path on which its event was handled.
    /// Returns `true` if a record is due.
    pub(crate) fn counts_other_path(&self) -> bool {
        const PAUSE: Duration = Duration::from_secs(60);
        count!("tower_dedup_other_path_total", "namespace" => self.label());
        let mut logged = self.logged_other_path.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = logged.is_none_or(|logged| logged.elapsed() >= PAUSE);
        if is_due {
            *logged = Some(Instant::now());
        }
        is_due
    }

    /// Counts a delivery as running until the returned guard is dropped.
    pub(crate) fn running(&self) -> Counted {
        Counted {
            #[cfg(feature = "metrics")]
            gauge: counting(&self.keys.running),
        }
    }

    /// Counts a delivery as waiting until the returned guard is dropped.
    pub(crate) fn waiting(&self) -> Counted {
        Counted {
            #[cfg(feature = "metrics")]
            gauge: counting(&self.keys.waiting),
        }
    }

    /// Counts a store call that outlives its delivery as pending until the returned guard is
    /// dropped.
    pub(crate) fn pending_write(&self) -> Counted {
        Counted {
            #[cfg(feature = "metrics")]
            gauge: counting(&key("tower_dedup_pending_writes", &self.namespace, None)),
        }
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the namespace as a label of a metric.
    pub(super) fn label(&self) -> String {
        self.namespace.to_string()
    }

    /// Counts a delivery that has ended.
    #[cfg(feature = "metrics")]
    pub(super) fn count(
        &self,
        outcome: Outcome,
        took: Duration,
        attempt: Option<u32>,
        age: Option<Duration>,
    ) {
        let [deliveries, durations] = &**self.keys.ended[outcome as usize].get_or_init(|| {
            let names = ["tower_dedup_deliveries_total", "tower_dedup_delivery_duration_seconds"];
            let outcome = Some(("outcome", outcome.as_str()));
            Box::new(names.map(|name| key(name, &self.namespace, outcome)))
        });
        metrics::with_recorder(|to| {
            to.register_counter(deliveries, &METADATA).increment(1);
            to.register_histogram(durations, &METADATA).record(took);
            if attempt == Some(1) {
                let key = &self.keys.first_attempts[usize::from(outcome.ends_completed())];
                to.register_counter(key, &METADATA).increment(1);
            }
            if let Some(age) = age {
                to.register_histogram(&self.keys.duplicate_age, &METADATA).record(age);
            }
        });
    }
}

#[cfg(feature = "metrics")]
fn key(
    name: &'static str,
    namespace: &Arc<str>,
    label: Option<(&'static str, &'static str)>,
) -> metrics::Key {
    // Shared, so that the recorder does not copy it.
    let namespace = metrics::SharedString::from_shared(Arc::clone(namespace));
    let mut labels = vec![metrics::Label::new("namespace", namespace)];
    labels.extend(label.map(|(name, value)| metrics::Label::from_static_parts(name, value)));
    metrics::Key::from_parts(name, labels)
}

impl std::fmt::Debug for Meters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meters").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// The namespaces of a deduplicator that have meters of their own. With their series, which a
/// recorder of metrics keeps, they are some megabytes.
const MOST_NAMESPACES: usize = 1_000;

/// The meters of a deduplicator, whose namespaces are those of its keys. All further namespaces are
/// `other`.
#[derive(Default)]
pub(crate) struct MetersByNamespace(Mutex<HashMap<Arc<str>, Arc<Meters>>>);

impl MetersByNamespace {
    pub(crate) fn get(&self, namespace: &str) -> Arc<Meters> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_own = known.len() < MOST_NAMESPACES || known.contains_key(namespace);
        let namespace = if has_own { namespace } else { "other" };
        if let Some(meters) = known.get(namespace) {
            return Arc::clone(meters);
        }
        let namespace = Arc::from(namespace);
        let meters = Arc::new(Meters::new(&namespace, false, LogIds::Plain));
        known.insert(namespace, Arc::clone(&meters));
        meters
    }
}

/// Counts in a gauge until it is dropped.
pub(crate) struct Counted {
    #[cfg(feature = "metrics")]
    gauge: metrics::Gauge,
}

#[cfg(feature = "metrics")]
fn counting(key: &metrics::Key) -> metrics::Gauge {
    let gauge = metrics::with_recorder(|to| to.register_gauge(key, &METADATA));
    gauge.increment(1.0);
    gauge
}

impl Drop for Counted {
    fn drop(&mut self) {
        #[cfg(feature = "metrics")]
        self.gauge.decrement(1.0);
    }
}
