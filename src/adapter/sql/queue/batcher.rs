//! [`Batcher`]: the callers' side of the queue.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::lane::{BatchExecutor, BatcherState, Lane, no_reply};
use super::options::Batching;
use super::queue::{BatchItem, Queue, QueueReply};
use super::runtime::Mutex;
use crate::error::{Error, ErrorKind};

const KEYS_WORTH_A_LANE: usize = 32;
/// How often a call is queued whose lane ended before the call was sent.
const MAX_TRIES: usize = 4;

/// Collects calls while batches are being sent. It knows nothing of stores.
pub(in crate::adapter) struct Batcher<I: BatchItem>(Arc<BatcherState<I>>);

impl<I: BatchItem> Batcher<I> {
    /// Creates a batcher that sends up to `lanes` batches at the same time.
    pub(in crate::adapter) fn new(lanes: usize, batching: Batching) -> Self {
        Self(Arc::new(BatcherState {
            lanes,
            max_batch_keys: batching.batch_keys(),
            max_queued_keys: batching.queued_keys(),
            keys_worth_a_lane: KEYS_WORTH_A_LANE.min(batching.batch_keys()),
            queue: Mutex::new(Queue::default()),
        }))
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
            if item.is_bounded() && queue.len() >= shared.max_queued_keys {
                return Err(Error::new(ErrorKind::Overloaded, "queueing a call"));
            }
            let ticket = queue.push(item, reply);
            (ticket, queue.opens_lane(shared.lanes, shared.keys_worth_a_lane))
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
