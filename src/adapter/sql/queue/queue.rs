//! [`Queue`]: the calls that wait, and which of them form the next batch.

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

/// The waiting calls of all runtimes, and the lanes that send them.
pub(super) struct Queue<I: BatchItem> {
    /// In the order of their tickets.
    waiting: VecDeque<Waiting<I>>,
    /// How many keys wait.
    pub(super) keys: usize,
    next_ticket: u64,
    /// The runtime of each open lane.
    lanes: Vec<RuntimeId>,
    /// How many lanes wait for a batch that is late.
    late: usize,
}

impl<I: BatchItem> Default for Queue<I> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), keys: 0, next_ticket: 0, lanes: Vec::new(), late: 0 }
    }
}

impl<I: BatchItem> Queue<I> {
    /// Returns `true` if `keys` more may wait. Looks at no call that waits, because callers are refused
    /// while the store is slow.
    pub(super) fn has_room(&self, keys: usize, max: usize) -> bool {
        self.keys == 0 || self.keys + keys <= max
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the call's ticket.
    pub(super) fn push(&mut self, item: I, reply: ReplySender<I>) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.keys += item.key_hashes().len();
        self.waiting.push_back(Waiting { ticket, item, reply });
        ticket
    }

    /// Forgets an abandoned call, if it still waits: its room is free at once.
    pub(super) fn abandon(&mut self, ticket: u64) {
        let found = self.waiting.binary_search_by_key(&ticket, |waiting| waiting.ticket);
        if let Some(waiting) = found.ok().and_then(|index| self.waiting.remove(index)) {
            self.keys -= waiting.item.key_hashes().len();
        }
    }

    /// Counts another lane if the queue needs one; the caller starts it.
    ///
    /// A runtime without a lane needs one, whatever the number: the runtimes of the other lanes may not
    /// be driven. Otherwise `min_keys` have to wait, or any call while a batch is late.
    pub(super) fn opens_lane(&mut self, runtime: RuntimeId, lanes: usize, min_keys: usize) -> bool {
        let is_needed = self.keys >= min_keys || self.late > 0;
        let has_place = self.lanes.len() < self.max_lanes(lanes);
        let opens =
            self.has_waiting() && (!self.lanes.contains(&runtime) || is_needed && has_place);
        if opens {
            self.lanes.push(runtime);
        }
        opens
    }

    /// Removes a lane. Returns the calls that wait, if it was the last one.
    pub(super) fn close_lane(&mut self, runtime: RuntimeId) -> VecDeque<Waiting<I>> {
        if let Some(lane) = self.lanes.iter().position(|lane| *lane == runtime) {
            self.lanes.swap_remove(lane);
        }
        if !self.lanes.is_empty() {
            return VecDeque::new();
        }
        self.keys = 0;
        std::mem::take(&mut self.waiting)
    }

    #[cfg(test)]
    #[allow(dead_code, reason = "used by the model, which compiles its own copy of this file")]
    pub(super) fn has_lanes(&self) -> bool {
        !self.lanes.is_empty()
    }

    /// Counts a lane whose batch is late.
    pub(super) fn add_late(&mut self) {
        self.late += 1;
    }

    /// Counts a batch as sent.
    pub(super) fn finish_batch(&mut self, late: bool) {
        self.late -= usize::from(late);
    }

    /// Lanes whose batches are late do not count, up to `lanes` of them.
    fn max_lanes(&self, lanes: usize) -> usize {
        lanes.saturating_add(self.late.min(lanes))
    }

    /// Returns `true` if a lane of this runtime was started beside a late batch that is no longer late.
    /// The last lane of a runtime stays.
    pub(super) fn has_surplus(&self, runtime: RuntimeId, lanes: usize) -> bool {
        let of_runtime = self.lanes.iter().filter(|lane| **lane == runtime).count();
        self.lanes.len() > self.max_lanes(lanes) && of_runtime > 1
    }

    /// Takes the calls that can be sent together, from the front.
    pub(super) fn take(&mut self, max_keys: usize) -> Vec<Waiting<I>> {
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
