//! [`Queue`]: the calls that wait, and which of them form the next batch.

use std::collections::VecDeque;

use tokio::sync::oneshot;

use crate::error::Error;

/// How many batches a lane looks ahead for calls that can join its batch.
const LOOK_AHEAD: usize = 4;

/// One call.
pub(in crate::adapter) trait BatchItem: Send + 'static {
    type Reply: Send + 'static;

    /// Returns `true` if one statement can do both calls.
    fn can_join(&self, other: &Self) -> bool;

    /// Returns `true` if the call is refused while too many calls wait: it begins something.
    fn is_bounded(&self) -> bool;
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

/// The waiting calls, and how many lanes send them.
pub(super) struct Queue<I: BatchItem> {
    /// In the order of their tickets.
    waiting: VecDeque<Waiting<I>>,
    next_ticket: u64,
    /// How many lanes are open.
    lanes: usize,
    /// How many of them wait for the reply to a batch.
    sending: usize,
    /// How many of these batches are late.
    late: usize,
}

impl<I: BatchItem> Default for Queue<I> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), next_ticket: 0, lanes: 0, sending: 0, late: 0 }
    }
}

impl<I: BatchItem> Queue<I> {
    /// Returns how many calls wait. A caller that drops its future gives its room back itself, so a refusal
    /// looks at no call: callers are refused while the store is slow.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the call's ticket.
    pub(super) fn push(&mut self, item: I, reply: ReplySender<I>) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back(Waiting { ticket, item, reply });
        ticket
    }

    /// Forgets an abandoned call, if it still waits: its room is free at once.
    pub(super) fn abandon(&mut self, ticket: u64) {
        let found = self.waiting.binary_search_by_key(&ticket, |waiting| waiting.ticket);
        found.ok().and_then(|index| self.waiting.remove(index));
    }

    /// Counts another lane if the queue needs one; the caller starts it.
    ///
    /// Beside other lanes, `min_calls` have to wait, or any call while a batch is late; and all lanes have to be
    /// sending, because one that is not takes the waiting calls next.
    pub(super) fn opens_lane(&mut self, max_lanes: usize, min_calls: usize) -> bool {
        let is_worth_it = self.len() >= min_calls || self.late > 0;
        let has_place = self.lanes < self.max_lanes(max_lanes) && self.sending == self.lanes;
        let opens = self.len() > 0 && (self.lanes == 0 || is_worth_it && has_place);
        self.lanes += usize::from(opens);
        opens
    }

    /// Removes a lane that is not sending. Returns the calls that wait, if it was the last one.
    pub(super) fn close_lane(&mut self) -> VecDeque<Waiting<I>> {
        self.lanes -= 1;
        if self.lanes > 0 {
            return VecDeque::new();
        }
        std::mem::take(&mut self.waiting)
    }

    #[cfg(test)]
    #[allow(dead_code, reason = "used by the model, which compiles its own copy of this file")]
    pub(super) fn has_lanes(&self) -> bool {
        self.lanes > 0
    }

    /// Counts a lane whose batch is late.
    pub(super) fn add_late(&mut self) {
        self.late += 1;
    }

    /// Counts a batch as sent.
    pub(super) fn finish_batch(&mut self, late: bool) {
        self.late -= usize::from(late);
        self.sending -= 1;
    }

    /// Lanes whose batches are late do not count, up to `lanes` of them.
    fn max_lanes(&self, lanes: usize) -> usize {
        lanes.saturating_add(self.late.min(lanes))
    }

    /// Returns `true` if a lane was started beside a late batch that is no longer late.
    pub(super) fn has_surplus(&self, max_lanes: usize) -> bool {
        self.lanes > self.max_lanes(max_lanes)
    }

    /// Takes the calls that can be sent together, from the front, for a lane that sends them now.
    pub(super) fn take(&mut self, max_calls: usize) -> Vec<Waiting<I>> {
        self.sending += 1;
        let (mut batch, mut skipped): (Vec<Waiting<I>>, Vec<_>) = (Vec::new(), Vec::new());
        while batch.len() < max_calls
            && skipped.len() <= max_calls * LOOK_AHEAD
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
