//! [`Batcher`]: the callers' side of the queue. [`Lane`]: the task that sends one batch after the other.

use std::future::Future;
use std::ops::DerefMut;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, PoisonError};

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::options::Batching;
use super::queue::{BatchItem, Queue, QueueReply, ReplySender, Waiting};
use super::runtime::{Mutex, late, spawn, yield_now};
use crate::error::{Error, ErrorKind};

/// Returns whether the caller of the call with this index in its batch still waits.
pub(in crate::adapter) type Waits<'b> = dyn Fn(usize) -> bool + Sync + 'b;

/// Sends batches to the store.
pub(in crate::adapter) trait BatchExecutor<I: BatchItem>:
    Send + Sync + 'static
{
    /// What a lane acquires before it takes a batch, so that no call counts as being sent while it
    /// cannot be sent.
    type SendGuard: Send;

    /// Acquires the guard. An error is the reply to all calls of the batch that the lane takes then.
    fn send_guard(&self) -> impl Future<Output = Result<Self::SendGuard, Error>> + Send;

    /// Returns one reply for each call, in their order. A batch goes on if a caller stops waiting.
    fn execute(
        &self,
        guard: Self::SendGuard,
        batch: Vec<I>,
        waits: &Waits<'_>,
    ) -> impl Future<Output = Vec<Result<I::Reply, Error>>> + Send;
}

/// How many keys wait when another lane starts; a full batch, if that has fewer. Below, the keys are cheaper
/// as a part of the next batch.
const KEYS_WORTH_A_LANE: usize = 16;
/// How often a call is queued whose lane ended before the call was sent.
const MAX_TRIES: usize = 4;

/// Collects calls while batches are being sent. It knows nothing of stores.
pub(in crate::adapter) struct Batcher<I: BatchItem>(Arc<BatcherState<I>>);

impl<I: BatchItem> Batcher<I> {
    /// Creates a batcher that sends up to `lanes` batches at the same time.
    pub(in crate::adapter) fn new(lanes: usize, batching: Batching) -> Self {
        Self(Arc::new(BatcherState { lanes, batching, queue: Mutex::new(Queue::default()) }))
    }

    /// Queues a call, and waits for its reply.
    ///
    /// A call whose future is dropped may or may not have been sent; no other call is disturbed.
    pub(in crate::adapter) async fn submit<E: BatchExecutor<I>>(
        &self,
        executor: &Arc<E>,
        mut item: I,
    ) -> Result<I::Reply, Error> {
        for _ in 0..MAX_TRIES {
            match self.push(executor, item)?.reply().await {
                Ok(QueueReply::Executed(reply)) => return reply,
                Ok(QueueReply::NotSent(again)) => item = again,
                Err(_) => return Err(no_reply()),
            }
        }
        Err(Error::new(ErrorKind::Refused, "sending a batch: the runtime is ending"))
    }

    /// Adds the call to the queue, and starts a lane if the queue needs one.
    fn push<E: BatchExecutor<I>>(
        &self,
        executor: &Arc<E>,
        item: I,
    ) -> Result<Queued<'_, I>, Error> {
        let shared = &self.0;
        let (reply, receiver) = oneshot::channel();
        let (ticket, opens) = {
            let mut queue = shared.lock();
            if item.is_bounded() && queue.len() >= shared.batching.max_queued_keys {
                return Err(Error::new(ErrorKind::Overloaded, "queueing a call"));
            }
            let ticket = queue.push(item, reply);
            (ticket, queue.opens_lane(shared.lanes, shared.keys_worth_a_lane()))
        };
        let queued = Queued { shared, ticket: Some(ticket), receiver };
        if opens {
            Lane::start(Arc::clone(shared), Arc::clone(executor));
        }
        Ok(queued)
    }

    /// Returns how many keys wait; `None` if there are no lanes.
    #[cfg(test)]
    #[allow(dead_code, reason = "used by the model, which compiles its own copy of this file")]
    pub(super) fn waiting(&self) -> Option<usize> {
        let queue = self.0.lock();
        queue.has_lanes().then_some(queue.len())
    }
}

/// A call that was queued. If it is dropped before the reply, the call is forgotten if it was not sent.
struct Queued<'b, I: BatchItem> {
    shared: &'b BatcherState<I>,
    /// `None` once the call has its reply.
    ticket: Option<u64>,
    receiver: oneshot::Receiver<QueueReply<I>>,
}

impl<I: BatchItem> Queued<'_, I> {
    async fn reply(mut self) -> Result<QueueReply<I>, oneshot::error::RecvError> {
        let reply = (&mut self.receiver).await;
        self.ticket = None;
        reply
    }
}

impl<I: BatchItem> Drop for Queued<'_, I> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.shared.lock().abandon(ticket);
        }
    }
}

/// The limits of a batcher, and its queue.
struct BatcherState<I: BatchItem> {
    lanes: usize,
    batching: Batching,
    queue: Mutex<Queue<I>>,
}

impl<I: BatchItem> BatcherState<I> {
    fn keys_worth_a_lane(&self) -> usize {
        KEYS_WORTH_A_LANE.min(self.batching.max_batch_keys)
    }

    fn lock(&self) -> impl DerefMut<Target = Queue<I>> + '_ {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lane that is dropped early, because its runtime ends, leaves no caller waiting.
struct Lane<I: BatchItem, E: BatchExecutor<I>> {
    shared: Arc<BatcherState<I>>,
    executor: Arc<E>,
    /// Whether the queue counts this lane.
    open: bool,
    /// Whether it waits for the reply to a batch.
    sends: bool,
    /// Whether the batch is late.
    late: bool,
}

impl<I: BatchItem, E: BatchExecutor<I>> Lane<I, E> {
    /// Starts a lane that the queue counts already.
    fn start(shared: Arc<BatcherState<I>>, executor: Arc<E>) {
        let lane = Self { shared, executor, open: true, sends: false, late: false };
        spawn(lane.run());
    }

    async fn run(mut self) {
        while self.open {
            // Yield once, so that tasks woken together join one batch. Callers that have just got
            // their replies may call again.
            yield_now().await;
            let guard = self.executor.send_guard().await;
            let Some((items, replies)) = self.take() else { return };
            self.send(guard, items, replies).await;
        }
    }

    /// Takes the next batch, or closes the lane. Other lanes send the calls that still wait then.
    fn take(&mut self) -> Option<(Vec<I>, Vec<ReplySender<I>>)> {
        let mut queue = self.shared.lock();
        self.open = queue.len() > 0 && !queue.has_surplus(self.shared.lanes);
        if !self.open {
            queue.close_lane();
            return None;
        }
        let batch = queue.take(self.shared.batching.max_batch_keys);
        self.sends = true;
        drop(queue);
        self.start_another(self.shared.keys_worth_a_lane());
        Some(batch.into_iter().map(|Waiting { item, reply, .. }| (item, reply)).unzip())
    }

    async fn send(
        &mut self,
        guard: Result<E::SendGuard, Error>,
        items: Vec<I>,
        senders: Vec<ReplySender<I>>,
    ) {
        let replies = match guard {
            Ok(guard) => {
                let executor = Arc::clone(&self.executor);
                let waits =
                    |call: usize| senders.get(call).is_some_and(|sender| !sender.is_closed());
                let executed = AssertUnwindSafe(executor.execute(guard, items, &waits));
                let executed = executed.catch_unwind();
                self.watch(executed).await.unwrap_or_default()
            }
            Err(error) => items.iter().map(|_| Err(error.clone())).collect(),
        };
        // The replies follow: the last caller's runtime may stop running tasks after its reply, and a lane that
        // is open and not driven would delay every call.
        self.finish_batch();
        let mut replies = replies.into_iter();
        for sender in senders {
            // Without a reply, as after a panic, the outcome is unknown.
            let reply = replies.next().unwrap_or_else(|| Err(no_reply()));
            // The caller may have dropped its future.
            let _ = sender.send(QueueReply::Executed(reply));
        }
    }

    /// Waits for the batch. If the batch is late, lets another lane send the waiting calls: the
    /// connection may have fallen silent, and other calls need not wait for that to be detected.
    async fn watch<T>(&mut self, batch: impl Future<Output = T>) -> T {
        let mut batch = pin!(batch);
        tokio::select! {
            biased;
            batch = &mut batch => return batch,
            () = late() => {}
        }
        self.late = true;
        self.shared.lock().add_late();
        self.start_another(1);
        batch.await
    }

    /// Starts another lane if the queue needs one for the calls that still wait.
    fn start_another(&self, min_calls: usize) {
        if self.shared.lock().opens_lane(self.shared.lanes, min_calls) {
            Self::start(Arc::clone(&self.shared), Arc::clone(&self.executor));
        }
    }

    /// Counts the batch as sent, and closes the lane if nothing waits.
    fn finish_batch(&mut self) {
        self.sends = false;
        let mut queue = self.shared.lock();
        queue.finish_batch(std::mem::take(&mut self.late));
        self.open = queue.len() > 0;
        if !self.open {
            queue.close_lane();
        }
    }
}

impl<I: BatchItem, E: BatchExecutor<I>> Drop for Lane<I, E> {
    fn drop(&mut self) {
        if self.sends {
            self.finish_batch();
        }
        if !self.open {
            return;
        }
        let not_sent = self.shared.lock().close_lane();
        for Waiting { item, reply, .. } in not_sent {
            let _ = reply.send(QueueReply::NotSent(item));
        }
    }
}

fn no_reply() -> Error {
    Error::new(ErrorKind::Unavailable, "sending a batch: the batch ended without a reply")
}
