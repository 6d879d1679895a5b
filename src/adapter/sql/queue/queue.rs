//! [`Queue`]: the calls that wait in one runtime, and which of them form the next batch.

use std::collections::{HashMap, VecDeque};

use tokio::sync::oneshot;

use super::runtime::RuntimeId;
use crate::error::Error;

/// How many batches a lane looks ahead for calls that can join its batch.
const LOOK_AHEAD: usize = 4;

/// One call.
pub(in crate::adapter) trait BatchItem: Send + 'static {
    type Reply: Send + 'static;

    /// Returns `true` if one statement can do both calls.
    fn can_join(&self, other: &Self) -> bool;

    /// Returns a hash of each key. Keys with the same hash count as one key.
    fn key_hashes(&self) -> &[u64];

    /// Returns `true` if the call is refused while too many keys wait: it begins something.
    fn is_bounded(&self) -> bool;

    /// Returns `true` if other calls that also return `true` may name the same keys in one batch.
    fn allows_shared_keys(&self) -> bool;
}

pub(super) type ReplySender<I> = oneshot::Sender<QueueReply<I>>;

pub(super) enum QueueReply<I: BatchItem> {
    Executed(Result<I::Reply, Error>),
    /// The call was not sent, and its lane has ended: the caller gets it back.
    NotSent(I),
}

pub(super) struct Waiting<I: BatchItem> {
    /// The number of the call.
    pub(super) ticket: u64,
    pub(super) item: I,
    pub(super) reply: ReplySender<I>,
}

/// The queues of all runtimes. A lane ends with its runtime, and a runtime that does not run for a
/// while must not delay the callers of another one.
pub(super) struct Queues<I: BatchItem> {
    pub(super) by_runtime: HashMap<RuntimeId, Queue<I>>,
    /// How many keys wait, in all queues.
    pub(super) keys: usize,
    next_ticket: u64,
}

pub(super) struct Queue<I: BatchItem> {
    /// In the order of their tickets.
    waiting: VecDeque<Waiting<I>>,
    /// How many keys wait.
    keys: usize,
    lanes: usize,
    /// How many lanes wait for a batch that is late.
    late: usize,
}

impl<I: BatchItem> Default for Queues<I> {
    fn default() -> Self {
        Self { by_runtime: HashMap::new(), keys: 0, next_ticket: 0 }
    }
}

impl<I: BatchItem> Queues<I> {
    /// Returns `true` if `keys` more may wait. Looks at no call that waits, because callers are refused
    /// while the store is slow.
    pub(super) fn has_room(&self, keys: usize, max: usize) -> bool {
        self.keys == 0 || self.keys + keys <= max
    }

    /// Returns the call's ticket, and its queue.
    pub(super) fn push(
        &mut self,
        runtime: RuntimeId,
        item: I,
        reply: ReplySender<I>,
    ) -> (u64, &mut Queue<I>) {
        let (keys, ticket) = (item.key_hashes().len(), self.next_ticket);
        self.next_ticket += 1;
        let queue = self.by_runtime.entry(runtime).or_default();
        self.keys += keys;
        queue.keys += keys;
        queue.waiting.push_back(Waiting { ticket, item, reply });
        (ticket, queue)
    }

    /// Forgets an abandoned call, if it still waits: its room is free at once.
    pub(super) fn abandon(&mut self, runtime: RuntimeId, ticket: u64) {
        let Some(queue) = self.by_runtime.get_mut(&runtime) else { return };
        let found = queue.waiting.binary_search_by_key(&ticket, |waiting| waiting.ticket);
        let Some(waiting) = found.ok().and_then(|index| queue.waiting.remove(index)) else {
            return;
        };
        let keys = waiting.item.key_hashes().len();
        queue.keys -= keys;
        self.keys -= keys;
    }

    /// Takes the next batch. Returns an empty batch if the lane is not needed any more.
    pub(super) fn take(
        &mut self,
        runtime: RuntimeId,
        lanes: usize,
        max_keys: usize,
    ) -> Vec<Waiting<I>> {
        let Some(queue) = self.by_runtime.get_mut(&runtime) else { return Vec::new() };
        // A lane that was started beside a late batch ends after that batch.
        if queue.lanes > queue.max_lanes(lanes) {
            return Vec::new();
        }
        let before = queue.keys;
        let batch = queue.take(max_keys);
        self.keys -= before - queue.keys;
        batch
    }

    /// Counts a batch as sent.
    pub(super) fn finish_batch(&mut self, runtime: RuntimeId, late: bool) {
        let Some(queue) = self.by_runtime.get_mut(&runtime) else { return };
        queue.late -= usize::from(late);
    }

    pub(super) fn has_waiting(&self, runtime: RuntimeId) -> bool {
        self.by_runtime.get(&runtime).is_some_and(|queue| !queue.waiting.is_empty())
    }

    /// Removes a lane. Returns the calls that wait, if it was the last one.
    pub(super) fn close_lane(&mut self, runtime: RuntimeId) -> VecDeque<Waiting<I>> {
        let Some(queue) = self.by_runtime.get_mut(&runtime) else { return VecDeque::new() };
        queue.lanes -= 1;
        if queue.lanes > 0 {
            return VecDeque::new();
        }
        self.keys -= queue.keys;
        self.by_runtime.remove(&runtime).map(|queue| queue.waiting).unwrap_or_default()
    }
}

impl<I: BatchItem> Default for Queue<I> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), keys: 0, lanes: 0, late: 0 }
    }
}

impl<I: BatchItem> Queue<I> {
    /// Counts another lane if the queue needs one; the caller starts it.
    ///
    /// The first call needs a lane, and so does every call while a batch is late. Otherwise
    /// `min_keys` have to wait.
    pub(super) fn opens_lane(&mut self, lanes: usize, min_keys: usize) -> bool {
        let is_urgent = self.lanes == 0 || self.late > 0;
        let is_needed = if is_urgent { !self.waiting.is_empty() } else { self.keys >= min_keys };
        let opens = is_needed && self.lanes < self.max_lanes(lanes);
        self.lanes += usize::from(opens);
        opens
    }

    /// Counts a lane whose batch is late.
    pub(super) fn add_late(&mut self) {
        self.late += 1;
    }

    /// Lanes whose batches are late do not count, up to `lanes` of them.
    fn max_lanes(&self, lanes: usize) -> usize {
        lanes.saturating_add(self.late.min(lanes))
    }

    /// Takes the calls that can be sent together, from the front.
    fn take(&mut self, max_keys: usize) -> Vec<Waiting<I>> {
        let (mut batch, mut skipped): (Vec<Waiting<I>>, Vec<_>) = (Vec::new(), Vec::new());
        let (mut taken_keys, mut skipped_keys) = (0, 0);
        // The keys of the batch, and whether other calls may name them too.
        let mut batched: HashMap<u64, bool> = HashMap::new();
        while let Some(waiting) = self.waiting.pop_front() {
            let keys = waiting.item.key_hashes();
            let is_full = taken_keys + keys.len() > max_keys;
            if !batch.is_empty() && (is_full || skipped_keys > max_keys * LOOK_AHEAD) {
                self.waiting.push_front(waiting);
                break;
            }
            let joins = batch.first().is_none_or(|first| waiting.item.can_join(&first.item));
            let shares = waiting.item.allows_shared_keys();
            let is_free = |key: &u64| batched.get(key).is_none_or(|shared| shares && *shared);
            if joins && keys.iter().all(is_free) {
                taken_keys += keys.len();
                batched.extend(keys.iter().map(|key| (*key, shares)));
                batch.push(waiting);
            } else {
                skipped_keys += keys.len();
                skipped.push(waiting);
            }
        }
        self.keys -= taken_keys;
        for waiting in skipped.into_iter().rev() {
            self.waiting.push_front(waiting);
        }
        batch
    }
}
