//! The queue: calls that arrive while a statement is in progress are sent together in the next one.
//!
//! 1. No timer delays a call. The first call starts a *worker*, a task that sends one batch after the
//!    other. It ends before it replies if nothing waits then. Without calls nothing runs.
//! 2. A worker sends one batch at a time, and there are few workers. While all are sending, another one starts when
//!    16 keys wait, because then one more statement is worth its fixed cost; or when a batch is late
//!    (500 ms), because its connection may have fallen silent. Workers whose batches are late do not
//!    count, up to the configured number of workers.
//! 3. A batch holds calls that can be sent together: of one kind and with equal terms. A call that cannot join
//!    waits for a later batch. Calls that name the same key have no order, because a release is a fence.
//! 4. A caller that drops its future does not affect other callers. A call that was not sent yet is not
//!    sent; one that was sent is finished by its worker.
//! 5. The number of waiting calls is bounded. Past the bound a call is refused with
//!    [`StoreErrorKind::Overloaded`](crate::StoreErrorKind::Overloaded) and nothing was claimed. A refusal looks at
//!    no waiting call: a caller that drops its future gives its room back itself. The bound holds for claims only,
//!    because a running event depends on the other calls.
//! 6. All runtimes share the queue. A worker is a task of the runtime that started it, and sends calls of
//!    every runtime. When a runtime ends, the outcome of the calls that its workers were sending is unknown. If they
//!    were the last workers, callers that still wait send the others again.

mod batcher;
mod runtime;

pub(in crate::adapter) use batcher::{BatchExecutor, BatchItem, Batcher, Bounds, Waits};
