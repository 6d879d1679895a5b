//! [`Batcher`]: the callers' side of the queue. [`Worker`]: the task that sends one batch after the
//! other. [`Queue`]: the calls that wait, and which of them form the next batch.
//!
//! The model in `tests/protocol/queue` compiles this file too: it names nothing but
//! `super::runtime` and `crate::error`.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::DerefMut;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, PoisonError};

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::runtime::{Mutex, late, spawn, yield_now};
use crate::error::{StoreError, StoreErrorKind};

/// How much a queue does at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// How many batches are sent at the same time; up to twice as many while batches are late.
    pub(crate) workers: usize,
    /// How many calls one batch takes.
    pub(crate) max_batch_keys: usize,
    /// How many calls may wait, before claims are refused.
    pub(crate) max_queued_keys: usize,
}

impl Bounds {
    pub(crate) const fn new() -> Self {
        Self { workers: 2, max_batch_keys: 1_024, max_queued_keys: 16_384 }
    }
}

/// One call.
pub(crate) trait BatchItem: Clone + Send + 'static {
    type Reply: Send + 'static;

    /// Returns `true` if one statement can do both calls.
    fn can_join(&self, other: &Self) -> bool;

    /// Returns `true` if the call is refused while too many calls wait: it begins something.
    fn is_bounded(&self) -> bool;
}

/// Sends batches to the store.
pub(crate) trait BatchExecutor<I: BatchItem>: Send + Sync + 'static {
    /// What a worker acquires before it takes a batch, so that no call counts as being sent while
    /// it cannot be sent.
    type SendGuard: Send;

    /// Acquires the guard. An error is the reply to all calls of the batch that the worker takes
    /// then.
    fn send_guard(
        self: &Arc<Self>,
    ) -> impl Future<Output = Result<Self::SendGuard, StoreError>> + Send;

    /// Returns one reply for each call, in their order. A batch goes on if a caller stops waiting.
    fn execute(
        self: &Arc<Self>,
        guard: Self::SendGuard,
        batch: Vec<I>,
    ) -> impl Future<Output = Vec<Result<I::Reply, StoreError>>> + Send;
}

/// How many keys wait when another worker starts; a full batch, if that has fewer. Below, the keys
/// are cheaper as a part of the next batch.
const KEYS_WORTH_A_WORKER: usize = 16;
/// How many batches a worker looks ahead for calls that can join its batch.
const LOOK_AHEAD: usize = 4;
/// How often a call is queued whose worker ended before the call was sent.
const MAX_TRIES: usize = 4;

/// Collects calls while batches are being sent. It knows nothing of stores.
pub(crate) struct Batcher<I: BatchItem>(Arc<Mutex<Queue<I>>>);

impl<I: BatchItem> Batcher<I> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self(Arc::new(Mutex::new(Queue::new(bounds))))
    }

    /// Queues a call, and waits for its reply.
    ///
    /// A call whose future is dropped may or may not have been sent; no other call is disturbed.
    pub(crate) async fn submit<E: BatchExecutor<I>>(
        &self,
        executor: &Arc<E>,
        item: I,
    ) -> Result<I::Reply, StoreError> {
        for _ in 0..MAX_TRIES {
            let (reply, receiver) = oneshot::channel();
            let (ticket, opens) = {
                let mut queue = lock(&self.0);
                (queue.push(item.clone(), reply)?, queue.opens_worker())
            };
            let mut queued = Queued { queue: &self.0, ticket: Some(ticket) };
            if opens {
                Worker::start(Arc::clone(&self.0), Arc::clone(executor));
            }
            let reply = receiver.await;
            queued.ticket = None;
            match reply {
                Ok(Some(reply)) => return reply,
                Ok(None) => {}
                Err(_) => return Err(no_reply()),
            }
        }
        Err(StoreError::new(StoreErrorKind::Refused, "sending a batch: the runtime is ending"))
    }

    /// Returns how many keys wait; `None` if there are no workers.
    #[cfg(shuttle)]
    pub(super) fn waiting(&self) -> Option<usize> {
        let queue = lock(&self.0);
        (queue.workers > 0).then_some(queue.waiting.len())
    }
}

/// A call that was queued. If it is dropped before the reply, the call is forgotten if it was not
/// sent.
struct Queued<'b, I: BatchItem> {
    queue: &'b Mutex<Queue<I>>,
    /// `None` once the call has its reply.
    ticket: Option<u64>,
}

impl<I: BatchItem> Drop for Queued<'_, I> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            lock(self.queue).abandon(ticket);
        }
    }
}

fn lock<I: BatchItem>(queue: &Mutex<Queue<I>>) -> impl DerefMut<Target = Queue<I>> + '_ {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A worker that is dropped early, because its runtime ends, leaves no caller waiting.
struct Worker<I: BatchItem, E: BatchExecutor<I>> {
    queue: Arc<Mutex<Queue<I>>>,
    executor: Arc<E>,
    /// Whether the queue counts this worker.
    open: bool,
    /// Whether it waits for the reply to a batch.
    sends: bool,
    /// Whether the batch is late.
    late: bool,
}

impl<I: BatchItem, E: BatchExecutor<I>> Worker<I, E> {
    /// Starts a worker that the queue counts already.
    fn start(queue: Arc<Mutex<Queue<I>>>, executor: Arc<E>) {
        let worker = Self { queue, executor, open: true, sends: false, late: false };
        spawn(worker.run());
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

    /// Takes the next batch, or closes the worker. Other workers send the calls that still wait
    /// then.
    fn take(&mut self) -> Option<(Vec<I>, Vec<ReplySender<I>>)> {
        let mut queue = lock(&self.queue);
        self.open = !queue.waiting.is_empty() && !queue.has_surplus();
        if !self.open {
            queue.close_worker();
            return None;
        }
        let batch = queue.take();
        self.sends = true;
        drop(queue);
        self.start_another();
        Some(batch.into_iter().map(|Waiting { item, reply, .. }| (item, reply)).unzip())
    }

    async fn send(
        &mut self,
        guard: Result<E::SendGuard, StoreError>,
        items: Vec<I>,
        senders: Vec<ReplySender<I>>,
    ) {
        let replies = match guard {
            Ok(guard) => {
                let executor = Arc::clone(&self.executor);
                let executed = AssertUnwindSafe(executor.execute(guard, items)).catch_unwind();
                self.watch(executed).await.unwrap_or_default()
            }
            Err(error) => items.iter().map(|_| Err(error.clone())).collect(),
        };
        // The replies follow: the last caller's runtime may stop running tasks after its reply, and
        // a worker that is open and not driven would delay every call.
        self.finish_batch();
        let mut replies = replies.into_iter();
        for sender in senders {
            // Without a reply, as after a panic, the outcome is unknown.
            let reply = replies.next().unwrap_or_else(|| Err(no_reply()));
            // The caller may have dropped its future.
            let _ = sender.send(Some(reply));
        }
    }

    /// Waits for the batch. If the batch is late, lets another worker send the waiting calls: the
    /// connection may have fallen silent, and other calls need not wait for that to be detected.
    async fn watch<T>(&mut self, batch: impl Future<Output = T>) -> T {
        let mut batch = pin!(batch);
        tokio::select! {
            biased;
            batch = &mut batch => return batch,
            () = late() => {}
        }
        self.late = true;
        lock(&self.queue).late += 1;
        self.start_another();
        batch.await
    }

    /// Starts another worker if the queue needs one for the calls that still wait.
    fn start_another(&self) {
        if lock(&self.queue).opens_worker() {
            Self::start(Arc::clone(&self.queue), Arc::clone(&self.executor));
        }
    }

    /// Counts the batch as sent, and closes the worker if nothing waits.
    fn finish_batch(&mut self) {
        self.sends = false;
        let mut queue = lock(&self.queue);
        queue.finish_batch(std::mem::take(&mut self.late));
        self.open = !queue.waiting.is_empty();
        if !self.open {
            queue.close_worker();
        }
    }
}

impl<I: BatchItem, E: BatchExecutor<I>> Drop for Worker<I, E> {
    fn drop(&mut self) {
        if self.sends {
            self.finish_batch();
        }
        if !self.open {
            return;
        }
        let not_sent = lock(&self.queue).close_worker();
        for Waiting { reply, .. } in not_sent {
            let _ = reply.send(None);
        }
    }
}

/// `None` says that the call was not sent, and that its worker has ended.
pub(super) type ReplySender<I> =
    oneshot::Sender<Option<Result<<I as BatchItem>::Reply, StoreError>>>;

pub(super) struct Waiting<I: BatchItem> {
    /// The number of the call.
    ticket: u64,
    pub(super) item: I,
    reply: ReplySender<I>,
}

/// The waiting calls, and how many workers send them.
pub(super) struct Queue<I: BatchItem> {
    bounds: Bounds,
    /// The waiting calls, in the order of their tickets.
    waiting: VecDeque<Waiting<I>>,
    next_ticket: u64,
    /// How many workers are open.
    workers: usize,
    /// How many of them wait for the reply to a batch.
    sending: usize,
    /// How many of these batches are late.
    pub(super) late: usize,
}

impl<I: BatchItem> Queue<I> {
    pub(super) fn new(bounds: Bounds) -> Self {
        let waiting = VecDeque::new();
        Self { bounds, waiting, next_ticket: 0, workers: 0, sending: 0, late: 0 }
    }

    /// Returns the call's ticket. A caller that drops its future gives its room back itself, so a
    /// refusal looks at no call: callers are refused while the store is slow.
    pub(super) fn push(&mut self, item: I, reply: ReplySender<I>) -> Result<u64, StoreError> {
        if item.is_bounded() && self.waiting.len() >= self.bounds.max_queued_keys {
            return Err(StoreError::new(StoreErrorKind::Overloaded, "queueing a call"));
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back(Waiting { ticket, item, reply });
        Ok(ticket)
    }

    /// Forgets an abandoned call, if it still waits: its room is free at once.
    pub(super) fn abandon(&mut self, ticket: u64) {
        let found = self.waiting.binary_search_by_key(&ticket, |waiting| waiting.ticket);
        found.ok().and_then(|index| self.waiting.remove(index));
    }

    /// Counts another worker if the queue needs one; the caller starts it.
    ///
    /// Beside other workers, [`KEYS_WORTH_A_WORKER`] have to wait, or any call while a batch is
    /// late; and all workers have to be sending, because one that is not takes the waiting calls
    /// next.
    pub(super) fn opens_worker(&mut self) -> bool {
        let worth_a_worker = KEYS_WORTH_A_WORKER.min(self.bounds.max_batch_keys);
        let is_worth_it = self.waiting.len() >= worth_a_worker || self.late > 0;
        let has_place = self.workers < self.max_workers() && self.sending == self.workers;
        let opens = !self.waiting.is_empty() && (self.workers == 0 || is_worth_it && has_place);
        self.workers += usize::from(opens);
        opens
    }

    /// Removes a worker that is not sending. Returns the calls that wait, if it was the last one.
    pub(super) fn close_worker(&mut self) -> VecDeque<Waiting<I>> {
        self.workers -= 1;
        if self.workers > 0 {
            return VecDeque::new();
        }
        std::mem::take(&mut self.waiting)
    }

    /// Counts a batch as sent.
    pub(super) fn finish_batch(&mut self, late: bool) {
        self.late -= usize::from(late);
        self.sending -= 1;
    }

    /// Workers whose batches are late do not count, up to the number of workers.
    fn max_workers(&self) -> usize {
        let workers = self.bounds.workers;
        workers.saturating_add(self.late.min(workers))
    }

    /// Returns `true` if a worker was started beside a late batch that is no longer late.
    pub(super) fn has_surplus(&self) -> bool {
        self.workers > self.max_workers()
    }

    /// Takes the calls that can be sent together, from the front, for a worker that sends them now.
    pub(super) fn take(&mut self) -> Vec<Waiting<I>> {
        let max_calls = self.bounds.max_batch_keys;
        self.sending += 1;
        let (mut batch, mut skipped): (Vec<Waiting<I>>, Vec<_>) = (Vec::new(), Vec::new());
        while batch.len() < max_calls
            && skipped.len() <= max_calls.saturating_mul(LOOK_AHEAD)
            && let Some(waiting) = self.waiting.pop_front()
        {
            if batch.first().is_none_or(|first| waiting.item.can_join(&first.item)) {
                batch.push(waiting);
            } else {
                skipped.push(waiting);
            }
        }
        for waiting in skipped.into_iter().rev() {
            self.waiting.push_front(waiting);
        }
        batch
    }
}

fn no_reply() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "sending a batch: the batch ended without a reply")
}
