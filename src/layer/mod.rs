//! The middleware.
//!
//! # The path of one delivery
//!
//! | step | function | file |
//! |---|---|---|
//! | take the ready inner service | `Dedup::call` | `service` |
//! | buffer the body | `ResponseFuture::poll` | `service`, `body` |
//! | read the keys, take a permit | `Run::dispatch` | `admit`, `request`, `gate` |
//! | start the delivery; move it to a task at its first wait | `Run::start` | `admit` |
//! | claim, wait, handle, settle, answer | `Run::to_the_end` | `delivery`, `answer`, and [`run`](crate::run) |
//! | return the response or the error, or resume the panic | `ResponseFuture::poll` | `service` |
//!
//! In [`Mode::Shadow`], `shadow` has the fifth step: `Run::to_the_end_in_shadow`.
//!
//! `run` and `delivery` say what happens if a future is dropped on this way.
//!
//! # Rules
//!
//! 1. Until the permit is taken, the caller's future does the work and nothing is claimed. So a
//!    client that hangs up costs nothing.
//! 2. From the claim on, the delivery runs to its end, even if the client hangs up. Servers drop
//!    the future of a request whose client has hung up, and senders do hang up. At its first wait,
//!    the delivery moves to a task of its own. Until then no caller can drop it. Most deliveries
//!    over a store in memory end without a wait. The current tracing span goes along; task-locals
//!    do not.
//! 3. A delivery takes one of `max_running` permits, then the inner service's readiness, then its
//!    claim. In another order, a delivery could hold its event while it waits for a place in an
//!    inner limit, and the deliveries in those places could wait for the event. A delivery that
//!    waits for another delivery of its event releases permit and readiness. To claim again, it
//!    waits for readiness, and takes a permit only if one is free: see [`gate`].
//! 4. The *ready* inner service is called, never a fresh clone of it.
//! 5. `type Error = S::Error`: this layer's failures are responses, so axum needs no
//!    `HandleErrorLayer`. They are never 2xx, because a 2xx means "stop retrying".
//! 6. A request that an outer copy of this layer runs already passes through. Otherwise the inner
//!    layer would find the event in flight, or complete.
//! 7. A panic of the handler is resumed in the caller, so that a catching layer works as if there
//!    were no task.

mod admit;
mod answer;
mod body;
mod builder;
mod config;
mod delivery;
mod end;
mod gate;
mod handle;
mod mode;
mod paths;
mod policy;
mod request;
mod service;
mod settings;
mod shadow;
mod stored;

pub use body::ResponseBody;
#[cfg(feature = "verify")]
pub(crate) use body::{BODY_LIMIT, BODY_TIMEOUT, Collect};
pub use builder::DedupLayer;
pub use end::{DeliveryEnd, ReportEnd};
pub use handle::DedupHandle;
pub use mode::Mode;
pub use policy::{Disposition, OnMismatch, OnMissingKey, OnUnavailable, Verified};
pub use service::{Dedup, ResponseFuture};
pub use settings::DedupSettings;
