//! The queue: calls that arrive while a statement is in progress are sent together in the next one.
//!
//! 1. No timer delays a call. The first call starts a *lane*, a task that sends one batch after the
//!    other. After the replies it lets the callers run once, and ends if nothing waits then. Without
//!    calls nothing runs.
//! 2. A lane sends one batch at a time, and there are few lanes. While all are sending, another one starts when
//!    32 keys wait, because then one more statement is worth its fixed cost; or when a batch is late
//!    (500 ms), because its connection may have fallen silent. Lanes whose batches are late do not
//!    count, up to the configured number of lanes.
//! 3. A batch holds calls that can be sent together: of one kind and with equal terms. A call that cannot join
//!    waits for a later batch. Calls that name the same key have no order, because a release is a fence.
//! 4. A caller that drops its future does not affect other callers. A call that was not sent yet is not
//!    sent; one that was sent is finished by its lane.
//! 5. The number of waiting calls is bounded. Past the bound a call is refused with
//!    [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded) and nothing was claimed. A refusal looks at
//!    no waiting call: a caller that drops its future gives its room back itself. The bound holds for claims only,
//!    because a running event depends on the other calls.
//! 6. All runtimes share the queue. A lane is a task of the runtime that started it, and sends calls of
//!    every runtime. A caller whose runtime has no lane starts one, so nobody waits for a runtime that
//!    stopped after its last reply; such a lane keeps the store open. When a runtime ends, the outcome of
//!    the calls that its lanes were sending is unknown. If they were the last lanes, callers that still
//!    wait send the others again.

mod batcher;
mod lane;
#[cfg(test)]
#[cfg(shuttle)]
#[allow(clippy::duplicate_mod, reason = "the model compiles the same source over another runtime")]
mod model;
mod options;
#[expect(clippy::module_inception, reason = "the folder is named after its main part")]
mod queue;
mod runtime;

pub(in crate::adapter) use batcher::Batcher;
pub(in crate::adapter) use lane::{BatchExecutor, Waits};
pub use options::Batching;
pub(in crate::adapter) use queue::BatchItem;
