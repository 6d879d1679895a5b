//! The handlers that run in this process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use tower_dedup::{DedupKey, Delivery};

/// The handlers that run now, in the order of their start. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Running(Arc<(AtomicU64, Mutex<BTreeMap<u64, Run>>)>);

#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) key: DedupKey,
    pub(crate) attempt: u32,
    pub(crate) since: Instant,
}

impl Running {
    pub(crate) fn list(&self) -> Vec<Run> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Run>> {
        self.0.1.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A middleware inside the layer: lists a delivery while its handler runs. A handshake has no
/// `Delivery`.
pub(crate) async fn track(
    State(running): State<Running>,
    delivery: Option<Delivery>,
    request: Request,
    next: Next,
) -> Response {
    let _guard = delivery.map(|delivery| {
        let number = running.0.0.fetch_add(1, Ordering::Relaxed);
        let (key, attempt) = (delivery.key().clone(), delivery.attempt());
        running.lock().insert(number, Run { key, attempt, since: Instant::now() });
        Guard { running, number }
    });
    next.run(request).await
}

/// Ends the listing, also if the handler panics or is dropped.
struct Guard {
    running: Running,
    number: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.running.lock().remove(&self.number);
    }
}
