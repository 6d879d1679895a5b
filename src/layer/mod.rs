//! The middleware, and the way of one delivery through it.
//!
//! 1. The body is buffered and the keys are read in the caller's future: nothing is claimed yet,
//!    and a client that goes away costs nothing.
//! 2. From the claim on, the delivery runs to its end, whatever the client does: servers drop the
//!    future of a request whose client hung up, and senders do hang up. So from the first time that
//!    it has to wait for something, it runs in a task of its own. Until then nobody can drop it, and
//!    most deliveries over a store in memory end before. The current tracing span goes along;
//!    task-locals do not.
//! 3. A delivery needs one of `max_running` permits and the inner service's readiness before it
//!    claims. One that waits for another delivery of its event gives both up, and takes both
//!    again, in that order, before it begins again.
//! 4. The *ready* inner service is called, never a fresh clone of it.
//! 5. `type Error = S::Error`: what goes wrong in this layer is a response, so that axum needs no
//!    `HandleErrorLayer`, and never a 2xx: that would mean "stop retrying".
//! 6. A request that already carries this very delivery, because the same layer is around the route
//!    twice, passes through: the inner layer would find its event in flight, or complete.
//! 7. A panic of the handler is resumed in the caller, so that a catching layer works as if there
//!    were no task.

mod admit;
mod answer;
mod body;
mod builder;
mod config;
mod delivery;
mod future;
mod gate;
mod handle;
mod paths;
mod policy;
mod service;

pub use answer::DedupResult;
pub use body::ResponseBody;
pub use builder::{DedupLayer, InnerBody};
pub use future::ResponseFuture;
pub use handle::DedupHandle;
pub use policy::{LogIds, OnInFlight, OnMismatch, OnMissingKey, OnUnavailable, Replay, Verified};
pub use service::Dedup;
