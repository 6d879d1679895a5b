//! Natural batching: calls that arrive while a statement is on the wire go out together with the
//! next one.
//!
//! 1. No timer delays a call: a call that finds nothing under way is sent at once, by its caller,
//!    until somebody else waits for it. All else is for tasks, the lanes, which end when nothing waits
//!    any more: nothing runs when nobody calls.
//! 2. There are few lanes (a caller that sends its call is one of them), each with one batch on the
//!    wire. Another opens when so much waits that one statement more is worth its fixed price, or
//!    when a batch is late (500 ms): its connection may have fallen silent. A lane whose batch is
//!    late does not count, up to as many again as there may be lanes.
//! 3. A batch holds what one statement does: calls of one kind, or claims and completions where one
//!    insertion in the order of keys does for both, as on Postgres. It holds each key once, except
//!    that claims (or records) of one key may share it: the store is asked for one of them, and its
//!    answer tells the others'.
//! 4. Calls that name the same key are sent in the order in which they came: one whose key is on
//!    the wire, or named by a call that waits before it, waits too.
//! 5. A caller that goes away disturbs nobody. What it asked is not sent if it has not been yet;
//!    if it has, a task waits for the end of it.
//! 6. What waits is bounded, in rows, beside a call that its caller sends. Past the bound a call is refused with
//!    [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded): nothing was recorded.
//! 7. Calls of one runtime are sent by tasks of that runtime. When it ends, what was on the wire
//!    has an unknown outcome, and what was not sent is sent by those who still wait for it.

mod batching;
mod gather;
mod led;
mod tasks;

pub use batching::Batching;
pub(super) use gather::{Ask, Batcher, Carry};

#[cfg(test)]
#[allow(clippy::duplicate_mod, reason = "the model runs the same source over another runtime")]
mod model;
