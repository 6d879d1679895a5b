//! Tests of your own handler behind the layer.
//!
//! 1. [`redeliver`] sends a request several times, one after the other. [`redeliver_at_once`] sends
//!    the copies at the same time. Both return the [`Responses`] of all copies.
//! 2. [`abandon`] claims the key of a request like a process that dies afterwards.
//! 3. [`FaultyAdapter`] wraps a store whose calls fail, hang, or lose their replies.
//! 4. [`request`] makes a request of a preset's sender. With the feature `verify`, `sign` signs it.
//!
//! The helpers belong in tests: they panic on every failure that is not a response.
//!
//! The [guide](crate::guide::testing) says what to test, and how to try the real sender.

#![expect(
    clippy::missing_panics_doc,
    reason = "the module's documentation says when helpers panic"
)]

mod abandon;
mod faulty;
mod redeliver;
mod request;
#[cfg(feature = "verify")]
mod sign;

pub use abandon::abandon;
pub use faulty::{Fault, FaultyAdapter, StoreCall};
pub use redeliver::{Responses, redeliver, redeliver_at_once};
pub use request::request;
#[cfg(feature = "verify")]
pub use sign::{sign, sign_at};
