//! The queue: calls that arrive while a statement is in progress are sent together in the next one.
//!
//! 1. No timer delays a call. The first call starts a *worker*, a task that sends one batch after
//!    the other. If no call waits, it ends before it replies. Without calls, no worker runs.
//! 2. A worker sends one batch at a time, and there are few workers. While all are sending, another
//!    one starts when 16 keys wait, because then one more statement is worth its fixed cost; or
//!    when a batch is late (500 ms), because its connection may have become silent. Workers whose
//!    batches are late do not count, up to the configured number of workers.
//! 3. A batch holds calls that can be sent together: of one kind and with equal terms. A call that
//!    cannot join waits for a later batch. Calls that name the same key have no order, because a
//!    release is a fence.
//! 4. A caller that drops its future does not affect other callers. A call that was not sent yet is
//!    not sent; one that was sent is finished by its worker.
//! 5. The number of waiting calls is bounded. Beyond the bound, a call is refused with
//!    [`StoreErrorKind::Overloaded`](crate::StoreErrorKind::Overloaded), and nothing was claimed. A
//!    refusal does not search the waiting calls: a caller that drops its future frees its slot
//!    itself. The bound holds for claims only, because a running event depends on the other calls.
//! 6. All runtimes share the queue. A worker is a task of the runtime that started it, and sends
//!    calls of every runtime. When a runtime ends, the outcome of the calls that its workers were
//!    sending is unknown. If they were the last workers, callers that still wait send the others
//!    again.

mod batcher;
mod runtime;

pub(crate) use batcher::{BatchExecutor, BatchItem, Batcher, Bounds};

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::time::timeout;

    use super::*;
    use crate::error::StoreError;

    impl BatchItem for u32 {
        type Reply = Self;

        fn can_join(&self, _: &Self) -> bool {
            true
        }

        fn is_bounded(&self) -> bool {
            true
        }
    }

    struct Echo;

    impl BatchExecutor<u32> for Echo {
        type SendGuard = ();

        async fn send_guard(self: &Arc<Self>) -> Result<(), StoreError> {
            Ok(())
        }

        async fn execute(
            self: &Arc<Self>,
            (): (),
            batch: Vec<u32>,
        ) -> Vec<Result<u32, StoreError>> {
            tokio::time::sleep(Duration::from_millis(1)).await;
            batch.into_iter().map(Ok).collect()
        }
    }

    /// The runtimes live on, and their tasks have no turn after the last reply.
    #[test]
    fn runtime_that_stops_after_its_last_reply_delays_no_other() {
        // A caller that has its reply goes on before another task.
        let runtime =
            || Builder::new_current_thread().enable_time().event_interval(1).build().unwrap();
        let (runtimes, batcher) =
            ([runtime(), runtime()], Batcher::new(Bounds { workers: 1, ..Bounds::new() }));
        let echo = Arc::new(Echo);
        for number in 0..6 {
            let call =
                async { timeout(Duration::from_secs(5), batcher.submit(&echo, number)).await };
            let reply = runtimes[number as usize % 2].block_on(call);
            assert_eq!(reply.expect("a reply").unwrap(), number);
        }
    }

    /// A caller that has its reply blocks its thread, which may drive the timers. The worker has
    /// another call to send, and must not wait for this thread.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn caller_that_blocks_its_thread_delays_no_other() {
        let bounds = Bounds { workers: 1, max_batch_keys: 1, ..Bounds::new() };
        let batcher = Arc::new(Batcher::new(bounds));
        let submit = |number| {
            let batcher = Arc::clone(&batcher);
            async move { batcher.submit(&Arc::new(Echo), number).await }
        };
        for _ in 0..20 {
            let (release, released) = std::sync::mpsc::channel::<()>();
            let first = submit(1);
            let blocking = tokio::spawn(async move {
                let reply = first.await;
                (reply, released.recv_timeout(Duration::from_secs(5)))
            });
            assert_eq!(tokio::spawn(submit(2)).await.unwrap().unwrap(), 2);
            let _ = release.send(());
            let (reply, released) = blocking.await.unwrap();
            assert_eq!(reply.unwrap(), 1);
            released.expect("a reply to the other caller");
        }
    }
}
