//! What goes on after the answer has left: bounded in number, in time, and in haste.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::key::DedupKey;
use crate::observe;

/// How many completions, releases and undone records may be under way at once.
const MOST: usize = 4_096;

const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(10);

pub(super) struct Background {
    tasks: TaskTracker,
    permits: Arc<Semaphore>,
}

/// Whether an attempt has settled the matter.
pub(super) enum Step {
    Settled,
    Again,
}

impl Background {
    pub(super) fn new() -> Self {
        Self { tasks: TaskTracker::new(), permits: Arc::new(Semaphore::new(MOST)) }
    }

    /// Repeats `attempt`, with growing pauses, until it is settled or `bound` has passed; then
    /// drops `until_then`.
    ///
    /// Outside a runtime, or with too much under way, nothing is done and that is logged.
    pub(super) fn repeat<F, G>(
        &self,
        operation: &'static str,
        key: Option<DedupKey>,
        bound: Duration,
        mut attempt: impl FnMut() -> F + Send + 'static,
        until_then: G,
    ) where
        F: Future<Output = Step> + Send,
        G: Send + 'static,
    {
        let (Ok(runtime), Ok(permit)) =
            (Handle::try_current(), Arc::clone(&self.permits).try_acquire_owned())
        else {
            observe::background(operation, observe::Background::Refused, key.as_ref());
            return;
        };
        let task = async move {
            let start = Instant::now();
            let mut delays = ExponentialBuilder::new()
                .with_min_delay(FIRST_DELAY)
                .with_max_delay(LONGEST_DELAY)
                .with_jitter()
                .without_max_times()
                .build();
            let result = loop {
                if let Step::Settled = attempt().await {
                    break observe::Background::Done;
                }
                let left = bound.saturating_sub(start.elapsed());
                if left.is_zero() {
                    break observe::Background::GaveUp;
                }
                tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY).min(left)).await;
            };
            observe::background(operation, result, key.as_ref());
            drop((until_then, permit));
        };
        self.tasks.spawn_on(task, &runtime);
    }

    /// Waits until nothing is under way.
    pub(super) async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.tasks.reopen();
    }
}
