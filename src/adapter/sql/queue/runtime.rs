//! What the queue needs of a runtime. The model in `tests/protocol/queue` replaces this file.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

pub(super) use std::sync::Mutex;

/// How long a batch may take before it is late.
const LATE: Duration = Duration::from_millis(500);

pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(task));
}

/// Yields once, so that tasks that are ready can run.
///
/// The task wakes itself, and goes to the end of a queue from which every worker thread takes
/// tasks. `tokio::task::yield_now` would leave it to its own thread, which a caller that has its
/// reply may block.
pub(super) fn yield_now() -> impl Future<Output = ()> {
    let mut has_yielded = false;
    poll_fn(move |context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
}

/// Waits until a batch that is sent now is late.
pub(super) async fn late() {
    tokio::time::sleep(LATE).await;
}
