//! A runtime that explores interleavings, and may end at any moment.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::task::Poll;

use shuttle::rand::{Rng, thread_rng};

pub(super) use shuttle::future::yield_now;
pub(super) use shuttle::sync::Mutex;

thread_local! {
    /// How many workers are still to be dropped early, as by runtimes that end.
    pub(super) static STOPS: Cell<u32> = const { Cell::new(0) };
    /// Whether batches may be late.
    pub(super) static LATE: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    let mut task = Some(Box::pin(task));
    let stoppable = poll_fn(move |cx| {
        if STOPS.get() > 0 && thread_rng().gen_bool(0.2) {
            STOPS.set(STOPS.get() - 1);
            task = None;
        }
        let Some(task) = &mut task else { return Poll::Ready(()) };
        task.as_mut().poll(cx)
    });
    drop(shuttle::future::spawn(stoppable));
}

/// Any batch may be late, at any moment.
pub(super) async fn late() {
    while !LATE.get() {
        std::future::pending::<()>().await;
    }
    while thread_rng().gen_bool(0.8) {
        yield_now().await;
    }
}
