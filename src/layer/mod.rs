//! The middleware, and the way of one delivery through it.
//!
//! 1. The caller's future buffers the body, reads the keys and takes a permit. Nothing is claimed
//!    yet, so a client that goes away costs nothing.
//! 2. From the claim on, the delivery runs to its end, whatever the client does. Servers drop the
//!    future of a request whose client hung up, and senders do hang up. At its first wait, the
//!    delivery moves to a task of its own; until then nobody can drop it, and most deliveries over a
//!    store in memory end before. The current tracing span goes along; task-locals do not.
//! 3. A delivery takes one of `max_running` permits, then the inner service's readiness, then its
//!    claim. A delivery that waits for another one of its event gives permit and readiness up, and
//!    takes them again in that order.
//! 4. The *ready* inner service is called, never a fresh clone of it.
//! 5. `type Error = S::Error`: this layer's failures are responses, so axum needs no
//!    `HandleErrorLayer`. They are never 2xx, because a 2xx means "stop retrying".
//! 6. A request that already carries this very delivery passes through: the same layer is around
//!    the route twice, and the inner one would find its event in flight, or complete.
//! 7. A panic of the handler is resumed in the caller, so that a catching layer works as if there
//!    were no task.
//!
//! | module | what |
//! |---|---|
//! | `policy`, `body`, `gate`, `paths` | choices; buffered bodies; permits and waiters; paths of events |
//! | `config` | every setting |
//! | `answer`, `report` | the layer's own responses; log records |
//! | `delivery` | the way of one delivery, from its claim to its ending |
//! | `admit` | from the head of a request to a delivery that runs |
//! | `future`, `service`, `handle`, `builder` | the public types |

mod admit;
mod answer;
mod body;
mod builder;
mod config;
mod delivery;
mod fallible;
mod future;
mod gate;
mod handle;
mod paths;
mod policy;
mod report;
mod service;

pub use answer::DedupResult;
pub use body::ResponseBody;
#[cfg(feature = "verify")]
pub(crate) use body::{BODY_LIMIT, BODY_TIMEOUT, BodyFault, Collect};
pub use builder::{DedupLayer, WithInnerBody};
pub use future::ResponseFuture;
pub use handle::DedupHandle;
pub use policy::{
    Disposition, LogIds, OnInFlight, OnMismatch, OnMissingKey, OnUnavailable, Replay, Verified,
};
pub use service::Dedup;
